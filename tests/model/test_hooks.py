"""A hook fires on the fused path whenever it fires on the plain one.

By default kernels are replaced by torch's operations, which call no modules either; with the
markers `gpu` and `triton` the kernels themselves run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as registry

import regard.attention
import regard.model
from regard import MultiHeadAttention, VisionTransformer
from regard.attention import fusing
from regard.attention.fusing import are_linear, compute_dtype, has_hooks
from regard.model.block import Block, FeedForward, PostNorm, PreNorm
from regard.model.dropout import Dropout
from regard.model.stack import Stack
from regard.model.vit import VisionConfig

B, L, S, D, HIDDEN, N = 2, 5, 3, 16, 32, 7
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
REAL = pytest.param("kernels", marks=[pytest.mark.gpu, pytest.mark.triton])

KINDS: dict[str, Callable[[nn.Module, Callable[..., None]], Any]] = {
    "forward": lambda module, see: module.register_forward_hook(lambda m, x, y: see(y)),
    "forward_pre": lambda module, see: module.register_forward_pre_hook(lambda m, x: see(x)),
    "full_backward": lambda module, see: module.register_full_backward_hook(
        lambda m, into, out: see(out)
    ),
    "backward_pre": lambda module, see: module.register_full_backward_pre_hook(
        lambda m, out: see(out)
    ),
}
GLOBAL = [
    registry.register_module_forward_hook,
    registry.register_module_forward_pre_hook,
    registry.register_module_full_backward_hook,
    registry.register_module_full_backward_pre_hook,
]


def replace_forward(module: nn.Module, see: Callable[..., None]) -> Any:
    forward = module.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        see(args)
        return forward(*args, **kwargs)

    module.forward = watched  # type: ignore[method-assign]
    return SimpleNamespace(remove=lambda: delattr(module, "forward"))


KINDS["replaced"] = replace_forward


@pytest.fixture(params=["stand-in", REAL])
def calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The fused operations that were called; fused paths are taken on the test's device."""
    names: list[str] = []
    if DEVICE == "cpu":  # on which half precision takes ten times as long
        monkeypatch.setattr(fusing, "HALF", (torch.float32,))

    def note(operations: dict[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
        def noted(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args: (names.append(name), run(*args))[1]

        return {name: noted(name, run) for name, run in operations.items()}

    operations = {regard.model: ("fused", FUSED), regard.attention: ("linear", LINEAR)}
    if request.param == "kernels":
        pytest.importorskip("triton")
        from regard.attention import linear
        from regard.model import fused

        for kernels, own in ((fused, FUSED), (linear, LINEAR)):
            for name, run in note({name: getattr(kernels, name) for name in own}).items():
                monkeypatch.setattr(kernels, name, run)
        return names
    monkeypatch.setattr(fusing, "_available", lambda device: True)
    monkeypatch.setattr("regard.attention.plan.fuses", lambda x: False)
    for package, (name, own) in operations.items():
        module = SimpleNamespace(**note(own))
        monkeypatch.setitem(sys.modules, f"{package.__name__}.{name}", module)
        monkeypatch.setattr(package, name, module, raising=False)
    return names


def normalize(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    return F.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)


def norm(x: Tensor, module: nn.LayerNorm, y: Tensor | None = None, dropout: float = 0.0) -> Any:
    total = x if y is None else x + F.dropout(y, dropout)
    return normalize(total, module).to(compute_dtype(x)), total


def feed_forward(x: Tensor, expand: nn.Linear, reduce: nn.Linear, gelu: bool) -> Tensor:
    hidden = F.linear(x, expand.weight, expand.bias)
    return F.linear(F.gelu(hidden) if gelu else hidden.relu(), reduce.weight, reduce.bias)


FUSED: dict[str, Callable[..., Any]] = {
    "norm": norm,
    "residual": lambda x, y, dropout: x + F.dropout(y, dropout),
    "add_norm": lambda x, y, dropout, module: normalize(x + F.dropout(y, dropout), module),
    "narrow": lambda x: (x, x.to(compute_dtype(x))),
    "feed_forward": feed_forward,
}
LINEAR: dict[str, Callable[..., Any]] = {
    "linear": F.linear,
    "parts": lambda joint, widths: joint.split(widths, -1),
}


def stack(residual: type[nn.Module], cross: bool = False, activation: Any = nn.ReLU) -> Stack:
    blocks = [
        Block(
            MultiHeadAttention(D, 1),
            FeedForward(D, HIDDEN, activation()),
            lambda: residual(D, 0.1),
            MultiHeadAttention(D, 1) if cross else None,
        )
        for _ in range(2)
    ]
    return Stack(blocks, nn.LayerNorm(D)).to(DEVICE)


def vit() -> VisionTransformer:
    shape: Any = {"width": D, "heads": 1, "feed_forward": HIDDEN, "layers": 2, "dropout": 0.0}
    return VisionTransformer(VisionConfig(N, 8, 4, **shape)).to(DEVICE)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "pre-norm": lambda: stack(PreNorm, activation=nn.GELU),
    "post-norm": lambda: stack(PostNorm),
    "decoder": lambda: stack(PreNorm, cross=True),
    "vit": vit,
}


def train(model: nn.Module) -> None:
    """Forwards and backwards, once."""
    inputs = [torch.ones(B, *((3, 8, 8) if isinstance(model, VisionTransformer) else (L, D)))]
    if isinstance(model, Stack) and cast(Block, model.blocks[0]).cross is not None:
        inputs.append(torch.ones(B, S, D))
    with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
        y = model(*(x.to(DEVICE).requires_grad_() for x in inputs))
    y.float().square().sum().backward()


def seen(value: Any) -> Any:
    """What a hook was given, by type and shape."""
    if isinstance(value, Tensor):
        return tuple(value.shape)
    return type(value).__name__, *map(seen, value if isinstance(value, tuple) else ())


def observe(model: nn.Module, kind: str, *paths: str) -> dict[str, list[Any]]:
    """What hooks on these modules are given in a step of training."""
    given: dict[str, list[Any]] = {path: [] for path in paths}

    def register(path: str) -> Any:
        return KINDS[kind](model.get_submodule(path), lambda x: given[path].append(seen(x)))

    handles = [register(path) for path in paths]
    train(model)
    for handle in handles:
        handle.remove()
    return given


@pytest.mark.parametrize("name", MODELS)
def test_a_hook_fires_on_every_module_of_a_fused_model(name: str, calls: list[str]) -> None:
    model = MODELS[name]().train()
    train(model)
    assert {"linear", "feed_forward"} <= set(calls)  # the paths that hooks must leave
    paths = [path for path, m in model.named_modules() if type(m) is not nn.ModuleList]
    if INTERPRETED:  # a step takes half a second: of one block, and of what is around them
        paths = [path for path in paths if "0" not in path]
    for kind in KINDS if DEVICE == "cuda" else ["full_backward"]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fusing, "_available", lambda device: False)
            plain = observe(model, kind, *paths)
        assert all(plain.values())
        for path in paths:
            assert observe(model, kind, path) == {path: plain[path]}


@pytest.mark.parametrize("register", GLOBAL)
def test_hooks_of_all_modules_fire_on_fused_paths(
    register: Callable[..., Any], calls: list[str]
) -> None:
    model, given = MODELS["pre-norm"]().train(), []
    handle = register(lambda module, *values: given.append(type(module)))
    train(model)
    handle.remove()
    assert {nn.Linear, nn.LayerNorm, nn.GELU, Dropout} <= set(given)
    assert not {"norm", "residual", "linear", "feed_forward"} & set(calls)


@pytest.mark.parametrize("kind", KINDS)
def test_only_a_module_that_runs_its_forward_alone_is_standard(kind: str) -> None:
    linear = nn.Linear(2, 3)
    assert are_linear(linear, nn.Linear(5, 7))
    handle = KINDS[kind](linear, lambda value: None)
    assert has_hooks(nn.ReLU(), linear)
    assert not are_linear(linear)
    handle.remove()
    assert are_linear(linear)
    assert not are_linear(nn.Bilinear(2, 3, 5))
    assert not are_linear(Shifted(2, 3))
    assert not are_linear(linear, nn.Linear(5, 7, bias=False))
    linear._compiled_call_impl = linear.forward  # as linear.compile() sets it
    assert has_hooks(linear)


class Doubled(nn.GELU):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Halved(nn.Dropout):
    def forward(self, x: Tensor) -> Tensor:
        return x / 2


class Shifted(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


class Flipped(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return -super().forward(x)


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("feed_forward.activation", Doubled()),
        ("feed_forward.dropout", Halved(0.0)),
        ("feed_forward.expand", Shifted(D, HIDDEN)),
        ("feed_forward.reduce", Shifted(HIDDEN, D)),
        ("attention.value", Shifted(D, D)),
        ("attention.output", Shifted(D, D)),
        ("add_attention.norm", Flipped(D)),
        ("add_feed_forward.dropout", Halved(0.0)),
    ],
)
@pytest.mark.parametrize("name", ["pre-norm", "post-norm"])
def test_a_subclass_of_a_fused_module_is_called(
    name: str, path: str, part: nn.Module, calls: list[str]
) -> None:
    model = MODELS[name]().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.get_submodule("blocks.0").set_submodule(path, part.to(DEVICE))
    x = torch.randn(B, L, D, device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
        fused = model(x)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fusing, "_available", lambda device: False)
            plain = model(x)
    assert calls
    assert (fused - plain).norm() < 0.05 * plain.norm()
