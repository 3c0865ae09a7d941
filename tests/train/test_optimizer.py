"""Adam's groups, and means of weights."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from regard.model.language import LanguageConfig, LanguageModel
from regard.model.transformer import Transformer, TransformerConfig
from regard.model.vit import VisionConfig, VisionTransformer
from regard.train.config import TrainingConfig
from regard.train.optimizer import MovingAverage, Muon, Snapshots, make, orthogonalized, split

MODELS = {
    "translator": lambda: Transformer(replace(TransformerConfig.tiny(13), position="learned")),
    "separate": lambda: Transformer(replace(TransformerConfig.tiny(13), share="none")),
    "vision": lambda: VisionTransformer(
        VisionConfig(5, image=14, patch=7, layers=1, width=12, heads=2, feed_forward=11)
    ),
    "language": lambda: LanguageModel(LanguageConfig.tiny(13)),
}


@pytest.mark.parametrize("name", MODELS)
def test_decay_pulls_matrices_alone(name: str) -> None:
    model = MODELS[name]()
    decayed, spared = split(model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert len(decayed) + len(spared) == len(names) == len({*decayed, *spared})
    for parameter in decayed:
        assert parameter.ndim >= 2
        assert names[parameter].endswith("weight")
        assert not any(word in names[parameter] for word in ("table", "norm", "position"))
    matrices = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    assert set(decayed) == set(matrices) - tables


def test_frozen_parameters_are_left_out() -> None:
    model = LanguageModel(LanguageConfig.tiny(13))
    model.tokens.requires_grad_(False)
    decayed, spared = split(model)
    assert model.tokens.table.weight not in {*decayed, *spared}
    with pytest.raises(ValueError, match="all parameters of the model are frozen"):
        make(model.requires_grad_(False), TrainingConfig())


@pytest.mark.parametrize("kind", ["adam", "adamw"])
def test_a_step_is_torchs(kind: str) -> None:
    model, twin = nn.Linear(5, 3), nn.Linear(5, 3)
    twin.load_state_dict(model.state_dict())
    config = TrainingConfig(optimizer=kind, lr=0.1, weight_decay=0.3)
    ours = make(model, config)
    theirs = (torch.optim.AdamW if kind == "adamw" else torch.optim.Adam)(
        [{"params": [twin.weight], "weight_decay": 0.3}, {"params": [twin.bias]}],
        lr=0.1,
        betas=(0.9, 0.98),
        eps=1e-9,
        weight_decay=0.0,
        fused=False,
        foreach=False,
    )
    for _ in range(3):
        x = torch.randn(7, 5)
        for net, optimizer in ((model, ours), (twin, theirs)):
            optimizer.zero_grad()
            net(x).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(model.weight, twin.weight)
    torch.testing.assert_close(model.bias, twin.bias)


class Blocks(nn.Module):
    """Layers within blocks, wide, square and tall, between an embedding and an output."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(7, 6)
        self.blocks = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 9), nn.Linear(9, 6)])
        self.output = nn.Linear(6, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x).relu()
        return self.output(x)  # type: ignore[no-any-return]


def test_a_step_of_muon_is_torchs() -> None:
    model, twin = Blocks(), Blocks()
    twin.load_state_dict(model.state_dict())
    ours = make(model, TrainingConfig(optimizer="muon", lr=0.1, weight_decay=0.3))
    assert isinstance(ours, Muon)
    matrices = [block.weight for block in twin.blocks]
    others = [p for p in twin.parameters() if not any(p is matrix for matrix in matrices)]
    muon = torch.optim.Muon(matrices, lr=0.1, weight_decay=0.3, adjust_lr_fn="match_rms_adamw")
    plain = {"betas": (0.9, 0.98), "eps": 1e-9, "fused": False, "foreach": False}
    adam = torch.optim.AdamW(
        [
            {"params": [p for p in others if p is not twin.output.weight], "weight_decay": 0.0},
            {"params": [twin.output.weight], "weight_decay": 0.3},
        ],
        lr=0.1,
        **plain,
    )
    for _ in range(3):
        x = torch.randint(7, (11,))
        for net, optimizers in ((model, [ours]), (twin, [muon, adam])):
            for optimizer in optimizers:
                optimizer.zero_grad()  # type: ignore[attr-defined]
            nn.functional.cross_entropy(net(x), x).backward()
            for optimizer in optimizers:
                optimizer.step()  # type: ignore[attr-defined]
        # torch's is in bfloat16, and the next gradients differ by it.
        twin_weights = dict(twin.named_parameters())
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter, twin_weights[name], atol=0.02, rtol=0.02)
        twin.load_state_dict(model.state_dict())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shape", [(16, 16), (3, 8, 31), (2, 40, 12)])
def test_orthogonalized(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """All singular values near 1, with the singular vectors that were there."""
    x = torch.randn(shape, dtype=torch.float64)
    found = orthogonalized(x.to(dtype))
    assert found.shape == x.shape
    assert found.dtype == dtype
    found = found.double()
    u, _, vt = torch.linalg.svd(x, full_matrices=False)
    inner = u.mT @ found @ vt.mT
    values = inner.diagonal(dim1=-2, dim2=-1)
    assert values.min() > 0.3  # of a very small one; most are above 0.7
    assert values.median() > 0.7
    assert values.max() < 1.3
    # float32 may be multiplied in bfloat16.
    error = 1e-7 if dtype == torch.float64 else 0.1
    torch.testing.assert_close(inner, torch.diag_embed(values), atol=error, rtol=0)


def test_muon_needs_blocks() -> None:
    with pytest.raises(ValueError, match="there are none to train; use adamw"):
        make(nn.Linear(5, 3), TrainingConfig(optimizer="muon"))
    for setting in ({"precision": "fp16"}, {"parallel": "sharded"}):
        with pytest.raises(ValueError, match="use adamw"):
            TrainingConfig(optimizer="muon", **setting)  # type: ignore[arg-type]


def test_moving_average() -> None:
    weight = nn.Parameter(torch.zeros(3))
    average = MovingAverage({"weight": weight}, 0.5)
    weight.data.fill_(1)
    average.update({"weight": weight}, average.weight(1))
    torch.testing.assert_close(average.means["weight"], torch.full((3,), 9 / 11))  # 2/11 < 0.5
    average.update({"weight": weight}, torch.tensor(average.weight(100)))
    torch.testing.assert_close(average.means["weight"], torch.full((3,), 10 / 11))


def test_snapshots(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    snapshots = Snapshots(tmp_path / "snapshots", 3)
    for step in (2, 4, 6, 8, 10):
        nn.init.constant_(model.weight, step)
        nn.init.constant_(model.bias, -step)
        snapshots.add(step, model)
    snapshots.average(model)
    torch.testing.assert_close(model.weight, torch.full((3, 2), 8.0))
    torch.testing.assert_close(model.bias, torch.full((3,), -8.0))
    # A run that goes on from step 8 will want 4, 6 and 8.
    snapshots.forget(8)
    assert snapshots.steps() == [4, 6, 8, 10]
    (snapshots.folder / ".000000012.safetensors.saving-0123abcd").mkdir()
    snapshots.rewind(8)
    assert snapshots.steps() == [4, 6, 8]
    assert len(list(snapshots.folder.iterdir())) == 3
