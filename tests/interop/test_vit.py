"""Hugging Face's and timm's Vision Transformers give the same logits here, and ours there."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from regard import VisionTransformer
from regard.interop import read, write
from regard.interop.timm import from_timm
from regard.model.baseline import Convolution
from regard.model.vit import VisionConfig

TINY = {
    "hidden_size": 15,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 23,
    "image_size": (14, 21),
    "patch_size": 7,
    "num_channels": 2,
    "num_labels": 5,
}
CONFIG = VisionConfig(5, (14, 21), 7, channels=2, layers=2, width=15, heads=3, feed_forward=23)


def shaken(model: nn.Module) -> Any:
    """No value at zero or one, where a mistake would not be seen."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model.eval()


def images(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(3, 2, 14, 21, dtype=dtype)


# --- Hugging Face


@pytest.fixture(scope="module")
def transformers() -> Any:
    library = pytest.importorskip("transformers")
    library.utils.logging.disable_progress_bar()
    return library


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"image_size": 21, "patch_size": [3, 3], "num_channels": 1},
        {"qkv_bias": False, "hidden_act": "silu", "layer_norm_eps": 1e-3},
        {"hidden_act": "relu", "num_hidden_layers": 1, "num_labels": 2},
    ],
    ids=str,
)
def test_huggingface(transformers: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    config = transformers.ViTConfig(**TINY | options)
    peer = shaken(transformers.ViTForImageClassification(config))
    peer.save_pretrained(tmp_path)
    imported = read(tmp_path)
    assert isinstance(imported.model, VisionTransformer)
    assert not imported.model.training
    x = torch.randn(3, config.num_channels, *peer.vit.embeddings.image_size, requires_grad=True)
    ours, theirs = imported.model(x), peer(x).logits
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    grads = [torch.autograd.grad(out.square().sum(), x)[0] for out in (ours, theirs)]
    torch.testing.assert_close(*grads, atol=1e-4, rtol=1e-4)
    features = peer.vit(x).last_hidden_state
    torch.testing.assert_close(imported.model.features(x), features, atol=1e-5, rtol=0)
    assert imported.notes == ()


def test_huggingface_names_of_models_in_memory(transformers: Any, tmp_path: Path) -> None:
    peer = shaken(transformers.ViTForImageClassification(transformers.ViTConfig(**TINY)))
    peer.config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert "architectures" not in config
    save_file(peer.state_dict(), tmp_path / "model.safetensors")
    assert "vit.layers.0.attention.q_proj.weight" in load_file(tmp_path / "model.safetensors")
    x = images()
    torch.testing.assert_close(read(tmp_path).model(x), peer(x).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_huggingface_in_other_precisions(
    transformers: Any, tmp_path: Path, dtype: torch.dtype
) -> None:
    peer = shaken(transformers.ViTForImageClassification(transformers.ViTConfig(**TINY)).to(dtype))
    torch.save(peer.state_dict(), tmp_path / "pytorch_model.bin")
    peer.config.save_pretrained(tmp_path)
    model = read(tmp_path).model
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    x = images(dtype)
    tolerance = 8 * torch.finfo(dtype).eps * peer(x).logits.abs().max().item()
    torch.testing.assert_close(model(x), peer(x).logits, atol=tolerance, rtol=0)


@pytest.mark.parametrize("width", [15, 11])
def test_the_pooler_is_our_tanh_layer(transformers: Any, tmp_path: Path, width: int) -> None:
    config = transformers.ViTConfig(**TINY, pooler_output_size=width)
    peer = shaken(transformers.ViTModel(config))
    peer.save_pretrained(tmp_path)
    imported, x = read(tmp_path), images()
    model = imported.model
    pooled = torch.tanh(model.head.hidden(model.represent(x)))
    torch.testing.assert_close(pooled, peer(x).pooler_output, atol=1e-5, rtol=0)
    assert model.config.head_width == width
    assert imported.task is not None
    assert imported.task["labels"] is None
    assert "replace_head" in imported.notes[0]
    assert model.replace_head(7)(x).shape == (3, 7)


def test_without_a_pooler(transformers: Any, tmp_path: Path) -> None:
    peer = transformers.ViTModel(transformers.ViTConfig(**TINY), add_pooling_layer=False)
    shaken(peer).save_pretrained(tmp_path)
    model, x = read(tmp_path).model, images()
    want = peer(x).last_hidden_state[:, 0]
    torch.testing.assert_close(model.represent(x), want, atol=1e-5, rtol=0)
    assert model.config.head_width is None
    assert not model(x).any()


def test_labels_and_pixels(transformers: Any, tmp_path: Path) -> None:
    labels = dict(enumerate(["ant", "bee", "cat", "dog", "élan"]))
    config = transformers.ViTConfig(**TINY, id2label=labels)
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path)
    task = read(tmp_path).task
    assert task == {
        "name": "classify",
        "labels": list(labels.values()),
        "size": [14, 21],
        "mean": [0.5, 0.5],
        "std": [0.5, 0.5],
        "interpolation": "bilinear",
        "resize": "squash",
        "crop": 1.0,
    }
    said = {"image_mean": [0.4, 0.3], "image_std": [0.2, 0.1], "resample": 3}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(said))
    task = read(tmp_path).task
    assert task is not None
    assert (task["mean"], task["std"], task["interpolation"]) == ([0.4, 0.3], [0.2, 0.1], "bicubic")
    # (p·r - m) / s with pixels p from 0 to 255 is (p/255 - m/255r) / (s/255r).
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(said | {"do_rescale": False}))
    task = read(tmp_path).task
    assert task is not None
    assert task["mean"] == pytest.approx([0.4 / 255, 0.3 / 255])
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(said | {"do_normalize": False}))
    task = read(tmp_path).task
    assert task is not None
    assert (task["mean"], task["std"]) == ([0.0, 0.0], [1.0, 1.0])


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        replace(CONFIG, image=21, activation="relu", epsilon=1e-3),
        replace(CONFIG, activation="silu", pool_norm=True, key_heads=3),
    ],
    ids=["non-square", "relu", "silu"],
)
def test_ours_to_huggingface(transformers: Any, tmp_path: Path, config: VisionConfig) -> None:
    model = shaken(VisionTransformer(config))
    task = {"labels": ["a", "b", "c", "d", "e"], "mean": [0.5, 0.4], "std": [0.2, 0.1]}
    folder = tmp_path / "out"
    write(model, folder, "vit", task=task)
    peer, report = transformers.ViTForImageClassification.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(report.values()), report
    assert peer.config.id2label == dict(enumerate("abcde"))
    x = torch.randn(3, 2, *model.patches.image)
    torch.testing.assert_close(peer.eval()(x).logits, model(x), atol=1e-5, rtol=0)
    again = read(folder)
    assert torch.equal(again.model(x), model(x))
    assert again.task is not None
    assert {name: again.task[name] for name in task} == task


def test_there_and_back_gives_the_same_folder(transformers: Any, tmp_path: Path) -> None:
    config = transformers.ViTConfig(**TINY)
    first, second = tmp_path / "first", tmp_path / "second"
    transformers.ViTForImageClassification(config).save_pretrained(first)
    imported = read(first)
    write(imported.model, second, "vit", task=imported.task)
    here, there = (load_file(folder / "model.safetensors") for folder in (first, second))
    assert here.keys() == there.keys()
    for name, tensor in here.items():
        assert torch.equal(tensor, there[name])
    was, came = (json.loads((folder / "config.json").read_text()) for folder in (first, second))
    was = {name: value for name, value in was.items() if name in came}
    assert came == was


def test_cropping_goes_to_the_processor_that_crops(tmp_path: Path) -> None:
    task = {
        "labels": None,
        "mean": [0.5, 0.5],
        "std": [0.5, 0.5],
        "interpolation": "bicubic",
        "resize": "shortest",
        "crop": 0.875,
    }
    write(VisionTransformer(CONFIG), tmp_path / "out", "vit", task=task)
    again = read(tmp_path / "out").task
    assert again is not None
    assert again["labels"] == [f"LABEL_{n}" for n in range(5)]
    del task["labels"]
    assert {name: again[name] for name in task} == task


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"pool": "mean"}, "class token, not pool='mean'.*--for vit"),
        ({"position": "sinusoidal"}, "learned, not sinusoidal.*--model.position learned"),
        ({"head_width": 7}, r"tanh layer \(head_width 7\)"),
        ({"activation": "swiglu"}, "have no swiglu"),
        ({"norm": "post"}, "norms come before"),
        ({"window": 2}, r"no window \(2\)"),
        ({"key_heads": 1}, r"key heads \(1\) as heads \(3\)"),
    ],
    ids=str,
)
def test_what_huggingface_has_not(tmp_path: Path, options: dict[str, Any], reason: str) -> None:
    model = VisionTransformer(replace(CONFIG, **options))
    with pytest.raises(ValueError, match=reason):
        write(model, tmp_path / "out", "vit")
    assert not (tmp_path / "out").exists()


def test_parts_of_ones_own_are_not_written(tmp_path: Path) -> None:
    model = VisionTransformer(CONFIG, attention=lambda position: Convolution(15, 3))
    with pytest.raises(ValueError, match=r"encoder\.blocks\.0\.attention is a Convolution, which"):
        write(model, tmp_path / "out", "vit")
    with pytest.raises(ValueError, match="a Linear cannot become a ViT"):
        write(nn.Linear(2, 3), tmp_path / "out", "vit")
    with pytest.raises(ValueError, match=r"labels \(2\) must be as many as classes \(5\)"):
        write(VisionTransformer(CONFIG), tmp_path / "out", "vit", task={"labels": ["a", "b"]})


def test_the_class_token_is_read_only_where_it_is() -> None:
    with pytest.raises(ValueError, match=r"pool \('class'\) reads the class token, .* use mean"):
        VisionTransformer(replace(CONFIG, class_token=False))
    model = VisionTransformer(replace(CONFIG, class_token=True, pool="mean"))
    assert model.features(images()).shape == (3, 7, 15)
    assert VisionTransformer(replace(CONFIG, pool="mean")).class_token is None


def test_what_huggingface_says_and_we_have_not(tmp_path: Path) -> None:
    write(VisionTransformer(CONFIG), tmp_path / "out", "vit")
    path = tmp_path / "out" / "config.json"
    said = json.loads(path.read_text())
    for change, reason in (
        ({"hidden_act": "gelu_new"}, r"hidden_act \('gelu_new'\) .* gelu, relu, silu, swish"),
        ({"patch_size": [7, 3]}, r"patch_size \(\(7, 3\)\) must be square"),
        ({"head_dim": 7}, r"head_dim \(7\) times num_attention_heads \(3\)"),
        ({"hidden_size": "15"}, r"width .* must be an int"),
        ({"id2label": {"1": "a", "7": "b"}}, "number its labels from 0 to 1|misshapen"),
    ):
        path.write_text(json.dumps(said | change))
        with pytest.raises(ValueError, match=reason) as caught:
            read(tmp_path / "out")
        assert "\n" not in str(caught.value)


def test_every_misfit_is_listed_at_once(tmp_path: Path) -> None:
    write(VisionTransformer(CONFIG), tmp_path / "out", "vit")
    path = tmp_path / "out" / "model.safetensors"
    tensors = load_file(path)
    del tensors["vit.layernorm.bias"], tensors["vit.embeddings.cls_token"]
    tensors["vit.embeddings.mask_token"] = torch.zeros(1, 1, 15)
    tensors["vit.embeddings.position_embeddings"] = torch.zeros(1, 11, 15)
    tensors["classifier.weight"] = torch.zeros(3, 15)
    save_file(tensors, path)
    with pytest.raises(ValueError, match="missing") as caught:
        read(tmp_path / "out")
    line = str(caught.value)
    assert "\n" not in line
    for named in (
        "missing vit.embeddings.cls_token, vit.layernorm.bias",
        "unexpected vit.embeddings.mask_token",
        "vit.embeddings.position_embeddings (1, 11, 15) for (1, 7, 15)",
        "classifier.weight (3, 15) for (5, 15)",
    ):
        assert named in line


# --- timm


def reference(state: dict[str, Tensor], x: Tensor, heads: int, pool: str, include: int) -> Tensor:
    """timm's VisionTransformer, from its published structure."""

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))

    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"], 1e-6)

    kernel = state["patch_embed.proj.weight"]
    x = F.conv2d(x, kernel, state["patch_embed.proj.bias"], stride=kernel.shape[-1])
    x = x.flatten(2).transpose(1, 2)
    B, prefix = len(x), 0
    if "cls_token" in state and "pos_embed" in state and state["pos_embed"].shape[1] == x.shape[1]:
        x = x + state["pos_embed"]
        x, prefix = torch.cat((state["cls_token"].expand(B, 1, -1), x), 1), 1
    else:
        if "cls_token" in state:
            x, prefix = torch.cat((state["cls_token"].expand(B, 1, -1), x), 1), 1
        x = x + state.get("pos_embed", 0)
    for n in range(2):
        at = f"blocks.{n}"
        B, S, D = x.shape
        qkv = linear(f"{at}.attn.qkv", norm(f"{at}.norm1", x))
        q, k, v = qkv.reshape(B, S, 3, heads, D // heads).permute(2, 0, 3, 1, 4)
        scores = (q * (D // heads) ** -0.5) @ k.transpose(-2, -1)
        y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(B, S, D)
        x = x + linear(f"{at}.attn.proj", y) * state.get(f"{at}.ls1.gamma", 1)
        y = linear(f"{at}.mlp.fc2", F.gelu(linear(f"{at}.mlp.fc1", norm(f"{at}.norm2", x))))
        x = x + y * state.get(f"{at}.ls2.gamma", 1)
    if "norm.weight" in state:
        x = norm("norm", x)
    x = x[:, 0] if pool == "token" else x[:, prefix:].mean(1)
    if "fc_norm.weight" in state:
        x = norm("fc_norm", x)
    if "pre_logits.fc.weight" in state:
        x = torch.tanh(linear("pre_logits.fc", x))
    return linear("head", x) if "head.weight" in state else x


def timm_state(
    *,
    patch: int = 7,
    channels: int = 2,
    positions: int = 7,
    token: bool = True,
    norm: str = "norm",
    hidden: int | None = None,
    classes: int = 5,
    scales: bool = False,
    qkv_bias: bool = True,
    proj_bias: bool = True,
) -> dict[str, Tensor]:
    D, M = 15, 23
    shapes: dict[str, tuple[int, ...]] = {
        "patch_embed.proj.weight": (D, channels, patch, patch),
        "patch_embed.proj.bias": (D,),
    }
    if token:
        shapes["cls_token"] = (1, 1, D)
    if positions:
        shapes["pos_embed"] = (1, positions, D)

    def linear(name: str, outputs: int, inputs: int, bias: bool = True) -> None:
        shapes[f"{name}.weight"] = (outputs, inputs)
        if bias:
            shapes[f"{name}.bias"] = (outputs,)

    for n in range(2):
        for part in ("norm1", "norm2"):
            shapes |= {f"blocks.{n}.{part}.weight": (D,), f"blocks.{n}.{part}.bias": (D,)}
        linear(f"blocks.{n}.attn.qkv", 3 * D, D, qkv_bias)
        linear(f"blocks.{n}.attn.proj", D, D, proj_bias)
        linear(f"blocks.{n}.mlp.fc1", M, D, proj_bias)
        linear(f"blocks.{n}.mlp.fc2", D, M, proj_bias)
        if scales:
            shapes |= {f"blocks.{n}.ls1.gamma": (D,), f"blocks.{n}.ls2.gamma": (D,)}
    shapes |= {f"{norm}.weight": (D,), f"{norm}.bias": (D,)}
    if hidden:
        linear("pre_logits.fc", hidden, D)
    if classes:
        linear("head", classes, hidden or D)
    return {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}


TIMM: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "class token": ({}, {}),
    "average, normalised after": ({"norm": "fc_norm"}, {}),
    "average, normalised before": ({}, {"pool": "avg"}),
    "average without a class token": ({"positions": 6, "token": False}, {}),
    "average without a class token, normalised after": (
        {"positions": 6, "token": False, "norm": "fc_norm"},
        {},
    ),
    "no position for the class token": ({"positions": 6}, {}),
    "no positions": ({"positions": 0}, {}),
    "scales on the branches": ({"scales": True}, {}),
    "no bias for queries, keys and values": ({"qkv_bias": False}, {}),
    "no bias at all": ({"qkv_bias": False, "proj_bias": False, "scales": True}, {}),
    "a hidden layer": ({"hidden": 11}, {}),
}


@pytest.mark.parametrize(("shape", "options"), TIMM.values(), ids=TIMM.keys())
def test_timm_by_its_structure(shape: dict[str, Any], options: dict[str, Any]) -> None:
    state, x = timm_state(**shape), images(torch.float64)
    model = from_timm(state, heads=3, image=(14, 21), **options)
    average = "fc_norm.weight" in state or "cls_token" not in state
    pool = options.get("pool", "avg" if average else "token")
    want = reference(state, x, 3, pool, 0)
    torch.testing.assert_close(model(x), want, atol=1e-10, rtol=1e-10)
    assert len(want.unique()) == want.numel()


def test_timm_sizes_follow_from_the_positions() -> None:
    for count, token in ((9, False), (10, True), (9, True)):
        state = timm_state(positions=count, token=token)
        assert from_timm(state, heads=3).config.image == 21
    with pytest.raises(ValueError, match=r"7 positions are not those of a square image; give imag"):
        from_timm(timm_state(), heads=3)
    with pytest.raises(ValueError, match="has no positions to tell the image's size"):
        from_timm(timm_state(positions=0), heads=3)


def test_timm_without_a_head() -> None:
    state, x = timm_state(classes=0), images(torch.float64)
    model = from_timm(state, heads=3, image=(14, 21))
    torch.testing.assert_close(model.represent(x), reference(state, x, 3, "token", 0))
    assert not model(x).any()


def test_timm_misfits_are_listed_at_once() -> None:
    state = timm_state()
    del state["norm.bias"], state["blocks.1.mlp.fc1.weight"]
    state["reg_token"] = torch.zeros(1, 4, 15)
    state["blocks.0.attn.qkv.weight"] = torch.zeros(15, 15)
    with pytest.raises(ValueError, match="missing") as caught:
        from_timm(state, heads=3, image=(14, 21))
    for named in (
        "norm.bias",
        "blocks.1.mlp.fc1.weight",
        "unexpected reg_token",
        "misshapen blocks.0.attn.qkv.weight (15, 15) for (45, 15)",
    ):
        assert named in str(caught.value)
    for change, reason in (
        ({"patch_embed.proj.weight": torch.zeros(15, 98)}, r"square patches.*not \(15, 98\)"),
        ({"patch_embed.proj.weight": torch.zeros(15, 2, 7, 3)}, r"not \(15, 2, 7, 3\)"),
    ):
        with pytest.raises(ValueError, match=reason):
            from_timm(timm_state() | change, heads=3, image=(14, 21))
    with pytest.raises(
        ValueError, match=r"global_pool \('map'\) is none of ours; use token or avg"
    ):
        from_timm(timm_state(), heads=3, image=(14, 21), pool="map")


@pytest.fixture
def timm_folder(tmp_path: Path) -> Callable[..., Path]:
    def folder(**changes: Any) -> Path:
        state = {name: tensor.float() for name, tensor in timm_state(positions=10).items()}
        save_file(state, tmp_path / "model.safetensors")
        said = {
            "architecture": "vit_tiny_patch16_224",
            "num_classes": 5,
            "global_pool": "token",
            "pretrained_cfg": {
                "input_size": [2, 21, 21],
                "mean": [0.4, 0.3],
                "std": [0.2, 0.1],
                "interpolation": "bicubic",
                "crop_pct": 0.9,
            },
        }
        (tmp_path / "config.json").write_text(json.dumps(said | changes))
        return tmp_path

    return folder


def test_timm_folder(timm_folder: Callable[..., Path]) -> None:
    imported = read(timm_folder())
    assert imported.model.config.heads == 3
    assert imported.task == {
        "name": "classify",
        "labels": ["0", "1", "2", "3", "4"],
        "size": [21, 21],
        "mean": [0.4, 0.3],
        "std": [0.2, 0.1],
        "interpolation": "bicubic",
        "resize": "shortest",
        "crop": 0.9,
    }
    names = ["n1", "n2", "n3", "n4", "n5"]
    imported = read(timm_folder(label_names=names, label_descriptions={"n2": "an ant"}))
    assert imported.task is not None
    assert imported.task["labels"] == ["n1", "an ant", "n3", "n4", "n5"]
    imported = read(timm_folder(architecture="deit_tiny_patch16_224.fb_in1k"))
    assert imported.origin == "timm's deit_tiny_patch16_224.fb_in1k."
    imported = read(timm_folder(model_args={"num_heads": 5, "img_size": 21}, pretrained_cfg=None))
    assert imported.model.config.heads == 5
    assert "how pixels are scaled" in imported.notes[0]
    for changes, reason in (
        ({"architecture": "vit_base_patch16_clip_224"}, "not one of timm's plain ViTs"),
        ({"architecture": "vit_giant_patch14_dinov2.lvd142m"}, "not one of timm's plain ViTs"),
        ({"architecture": "vit_base_patch16_gap_224"}, r"heads \(16\) must divide width \(15\)"),
        ({"architecture": "vit_so400m_patch14_siglip_224"}, "not one of timm's plain ViTs"),
        ({"model_args": {"act_layer": "silu"}}, r"change what tensors hide: \['act_layer'\]"),
        ({"label_names": ["a"]}, r"label_names \(1\) must be as many as classes, 5"),
    ):
        with pytest.raises(ValueError, match=reason):
            read(timm_folder(**changes))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"global_pool": "avg"},
        {"global_pool": "avg", "fc_norm": False},
        {"global_pool": "avg", "class_token": False},
        {"no_embed_class": True, "init_values": 0.1},
        {"qkv_bias": False, "img_size": (14, 21)},
    ],
    ids=str,
)
def test_timm_itself(options: dict[str, Any]) -> None:
    pytest.importorskip("torchvision")
    timm = pytest.importorskip("timm")
    sizes = {"img_size": 21, "patch_size": 7, "in_chans": 2, "num_classes": 5} | options
    peer = shaken(
        timm.models.vision_transformer.VisionTransformer(
            **sizes, embed_dim=15, depth=2, num_heads=3, mlp_ratio=2
        )
    )
    image = sizes["img_size"] if isinstance(sizes["img_size"], tuple) else None
    pool = options.get("global_pool", "token")
    model = from_timm(peer.state_dict(), heads=3, image=image, pool=pool)
    x = torch.randn(3, 2, *model.patches.image)
    torch.testing.assert_close(model(x), peer(x), atol=1e-5, rtol=1e-5)
