"""The Vision Transformer: its equation, its pools and heads, and its use for something else."""

import copy

import pytest
import torch
from torch import Tensor, nn

from regard import LearnedGridPositions, VisionConfig, VisionTransformer
from tests.model.samples import CHANNELS, IMAGE, PATCH, SIZES, D, close, images, lively, vision

B, CLASSES = 3, 7
POOLS = {
    "class": {},
    "mean": {"pool": "mean"},
    "mean beside a class token": {"pool": "mean", "class_token": True},
    "mean before the norm": {"pool": "mean", "pool_norm": True},
}

every_pool = pytest.mark.parametrize("pool", POOLS.values(), ids=POOLS)


def gradients(model: nn.Module, out: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    seeds = torch.randn_like(out)
    return list(torch.autograd.grad(out, model.parameters(), seeds))


# --- The equation


def test_it_is_patches_behind_a_class_token_through_an_encoder() -> None:
    model, pictures = vision(), images(B)
    kernel = model.patches.projection
    patches = nn.functional.conv2d(
        pictures, kernel.weight.view(D, CHANNELS, PATCH, PATCH), kernel.bias, stride=PATCH
    )
    x = patches.flatten(2).mT + model.patches.position.table
    first = (model.class_token + model.class_position).expand(B, 1, D)
    x = torch.cat((first, x), 1)
    for block in model.encoder.blocks:
        x = x + block.attention(block.add_attention.norm(x))
        x = x + block.feed_forward(block.add_feed_forward.norm(x))
    x = model.encoder.norm(x)
    close(model.features(pictures), x)
    close(model.represent(pictures), x[:, 0])
    close(model(pictures), x[:, 0] @ model.head.output.weight.T + model.head.output.bias)


def test_pools() -> None:
    for pool in POOLS.values():
        model, pictures = vision(**pool), images(B)
        features = model.features(pictures)
        with_token = not pool or "class_token" in pool
        assert features.shape == (B, 15 + with_token, D)
        want = features[:, 0] if not pool else features[:, with_token:].mean(1)
        if "pool_norm" in pool:
            assert model.encoder.norm is None
            want = model.norm(want)
        close(model.represent(pictures), want)
        assert (model.class_token is not None) == with_token


@every_pool
def test_a_last_block_without_the_rows_nobody_reads(pool: dict[str, object]) -> None:
    """Forwards and backwards as if all had been computed."""
    for more in ({}, {"norm": "post"}, {"key_heads": 2}, {"head_width": 11}):
        model, pictures = vision(**pool, **more), images(B)
        short = model(pictures)
        model.whole = True
        long = model(pictures)
        close(short, long)
        for one, two in zip(gradients(model, short), gradients(model, long)):
            close(one, two)


def test_rows_nobody_reads_are_not_computed() -> None:
    model, seen = vision(), []
    for block in model.encoder.blocks:
        block.feed_forward.register_forward_hook(lambda m, x, y: seen.append(y.shape[1]))
    model(images(B))
    assert seen == [16, 1]


@pytest.mark.parametrize("position", ["learned", "sinusoidal", "none"])
def test_positions(position: str) -> None:
    model, pictures = vision(position=position), images(B)
    assert (model.class_position is not None) == (position == "learned")
    moved = torch.cat((pictures[..., PATCH:], pictures[..., :PATCH]), -1)  # by one patch
    assert torch.allclose(model(pictures), model(moved)) == (position == "none")


def test_a_hidden_tanh_layer_at_pre_training() -> None:
    model, pictures = vision(head_width=11), images(B)
    hidden = model.head.hidden
    want = torch.tanh(model.represent(pictures) @ hidden.weight.T + hidden.bias)
    close(model(pictures), want @ model.head.output.weight.T + model.head.output.bias)
    assert vision().head.hidden is None


def test_an_attention_of_ones_own_is_given_all_rows() -> None:
    class Whole(nn.Module):
        def forward(self, x: Tensor, source: None = None, **rest: object) -> Tensor:
            assert source is None
            return x.mean(1, keepdim=True).expand_as(x)

    config = VisionConfig(CLASSES, IMAGE, PATCH, layers=2, **SIZES)
    model = VisionTransformer(config, attention=lambda position: Whole())
    assert model(images(B, torch.float32)).shape == (B, CLASSES)


# --- Used for something else


@every_pool
def test_replace_head_returns_a_copy(pool: dict[str, object]) -> None:
    model, pictures = vision(head_width=11, **pool), images(B)
    before = model(pictures)
    other = model.replace_head(13)
    assert other.config.classes == 13
    assert other.config.head_width is None
    assert other.head.hidden is None
    out = other(pictures)
    assert out.shape == (B, 13)
    assert out.dtype == torch.float64
    assert (out == 0).all()
    close(other.represent(pictures), model.represent(pictures))
    assert torch.equal(model(pictures), before)
    with torch.no_grad():
        next(other.parameters()).zero_()
    assert torch.equal(model(pictures), before)


@pytest.mark.parametrize("size", [(6, 10), (4, 6), (10, 6), 8, (12, 14)], ids=str)
def test_resize_images(size: int | tuple[int, int]) -> None:
    model = vision()
    other = model.resize_images(size)
    rows, columns = (size, size) if isinstance(size, int) else size
    assert other.patches.grid == (rows // PATCH, columns // PATCH)
    pictures = torch.randn(B, CHANNELS, rows, columns, dtype=torch.float64)
    assert other(pictures).shape == (B, CLASSES)
    want = nn.functional.interpolate(
        model.patches.position.table.T.view(1, D, 3, 5),
        (rows // PATCH, columns // PATCH),
        mode="bicubic",
        antialias=True,
    )
    close(other.patches.position.table, want[0].flatten(1).T)
    assert torch.equal(other.class_position, model.class_position)
    if size == IMAGE:
        close(other(pictures), model(pictures))
    assert other.config.image == size
    assert model.patches.grid == (3, 5)
    rebuilt = VisionTransformer(other.config).double().eval()
    rebuilt.load_state_dict(other.state_dict())
    assert torch.equal(rebuilt(pictures), other(pictures))


@pytest.mark.parametrize("position", ["sinusoidal", "none"])
def test_resize_images_without_a_table(position: str) -> None:
    other = vision(position=position).resize_images((4, 14))
    pictures = torch.randn(B, CHANNELS, 4, 14, dtype=torch.float64)
    rebuilt = VisionTransformer(other.config).double().eval()
    rebuilt.load_state_dict(other.state_dict())
    close(other(pictures), rebuilt(pictures))


def test_resize_images_returns_a_copy() -> None:
    model, pictures = vision(), images(B)
    before = model(pictures)
    other = model.resize_images((4, 14))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert model.config.image == IMAGE
    assert torch.equal(model(pictures), before)


def test_freeze_backbone_changes_the_model_itself() -> None:
    model = vision()
    assert model.freeze_backbone() is model
    assert model.replace_head(13).head.output.weight.requires_grad


def test_freeze_trains_the_head_alone() -> None:
    model = lively(vision().replace_head(13)).freeze_backbone()
    before = copy.deepcopy(model.state_dict())
    trained = [p for p in model.parameters() if p.requires_grad]
    assert {id(p) for p in trained} == {id(p) for p in model.head.parameters()}
    pictures = images(B)
    model(pictures).square().sum().backward()
    torch.optim.SGD(trained, lr=0.1).step()
    for name, after in model.state_dict().items():
        assert torch.equal(after, before[name]) == (not name.startswith("head."))


def test_all_three_one_after_the_other() -> None:
    model = (
        vision(torch.float32, head_width=5)
        .replace_head(13)
        .resize_images((10, 14))
        .freeze_backbone()
    )
    assert model(torch.randn(B, CHANNELS, 10, 14)).shape == (B, 13)
    assert isinstance(model.patches.position, LearnedGridPositions)
    assert not model.patches.position.table.requires_grad


def test_features_transfer() -> None:
    """What `represent` gives, a plain linear layer can learn from (claim 94)."""
    model, pictures = vision().freeze_backbone(), images(17)
    with torch.no_grad():
        vectors = model.represent(pictures)
    labels = torch.arange(17) % 2
    head = nn.Linear(D, 2).double()
    optimizer = torch.optim.Adam(head.parameters(), lr=0.1)
    for _ in range(60):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(head(vectors), labels)
        loss.backward()
        optimizer.step()
    assert loss < 0.5


# --- Living with it


def test_dropout() -> None:
    names = [
        name
        for name, module in vision(dropout=0.25).named_modules()
        if isinstance(module, nn.Dropout) and module.p == 0.25
    ]
    assert names == ["dropout"] + [
        f"encoder.blocks.{n}.add_{part}.dropout"
        for n in (0, 1)
        for part in ("attention", "feed_forward")
    ]
    model, pictures = vision(), images(B)
    assert torch.equal(model.train()(pictures), model.eval()(pictures))
    assert VisionConfig.base(CLASSES).dropout == 0


def test_state_dict_meta_device_and_copies() -> None:
    model, pictures = vision(torch.float32), images(B, torch.float32)
    with torch.device("meta"):
        twin = VisionTransformer(model.config)
    assert all(p.is_meta for p in twin.parameters())
    twin.to_empty(device="cpu").load_state_dict(model.state_dict())
    assert torch.equal(twin.eval()(pictures), model(pictures))
    assert torch.equal(copy.deepcopy(model)(pictures), model(pictures))
    low = copy.deepcopy(model).to(torch.bfloat16)(pictures.bfloat16())
    assert low.dtype == torch.bfloat16
    close(low.float(), model(pictures), 0.15)
    assert model.to("meta")(pictures.to("meta")).shape == (B, CLASSES)


def test_grey_pictures() -> None:
    model = vision(channels=1)
    assert model(torch.randn(B, 1, *IMAGE).double()).shape == (B, CLASSES)
