"""Every way to run a model gives the plain path's results and fires its hooks.

Rows are paths, columns are properties: results are equal within the path's tolerance, every hook
fires as often as on the plain path, and what a hook changes arrives. A path that cannot fire hooks
refuses a model that has any, and says so.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as registry

from regard.attention import fusing
from regard.checks import compute
from regard.checks.compute import Example
from regard.decode.engine.pick import pick
from regard.look.record import record
from regard.model.classifier import ClassifierConfig, TextClassifier
from regard.model.encoder import EncoderConfig, TextEncoder
from regard.model.language import LanguageConfig, LanguageModel
from regard.model.transformer import Transformer, TransformerConfig
from regard.model.vit import VisionConfig, VisionTransformer
from regard.train import capture
from regard.train.config import TrainingConfig

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
N = 53
SHAPE: dict[str, Any] = {"width": 32, "heads": 2, "feed_forward": 41, "dropout": 0.0}
TEXT = TransformerConfig(N, encoder_layers=2, decoder_layers=2, **SHAPE)
PRE = replace(TEXT, norm="pre", position="rotary", activation="gelu")

MODELS: dict[str, Callable[[], nn.Module]] = {
    "post-norm": lambda: Transformer(TEXT),
    "pre-norm": lambda: Transformer(PRE),
    "language": lambda: LanguageModel(LanguageConfig(N, layers=2, **SHAPE)),
    "encoder": lambda: TextEncoder(EncoderConfig(N, layers=2, **SHAPE)),
    "classifier": lambda: TextClassifier(ClassifierConfig(7, N, layers=2, **SHAPE)),
    "vision": lambda: VisionTransformer(VisionConfig(7, 24, 4, layers=2, **SHAPE)),
}
WRITERS = ["post-norm", "pre-norm", "language"]


def build(kind: str) -> Any:
    torch.manual_seed(0)
    model = MODELS[kind]().to(DEVICE).eval()
    if kind in ("vision", "classifier"):  # 0 at first
        nn.init.normal_(
            model.get_parameter("head.output.weight" if kind == "vision" else "head.weight")
        )
    return model


def examples(kind: str) -> list[Example]:
    """Three, of unlike lengths."""
    generator = torch.Generator().manual_seed(1)

    def ids(length: int) -> Tensor:
        return torch.randint(3, N, (length,), generator=generator).to(DEVICE)

    if kind == "vision":
        images = torch.randn(3, 3, 24, 24, generator=generator)
        return [Example(image.to(DEVICE), None) for image in images]
    pairs = ((11, 5), (2, 7), (7, 3))
    sources = kind != "language"
    targets = kind in WRITERS
    return [Example(ids(s) if sources else None, ids(t) if targets else None) for s, t in pairs]


@contextmanager
def plain() -> Iterator[None]:
    """Without fused kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fusing, "_available", lambda device: False)
        yield


# Paths: each computes one flat tensor


def logits(run: Callable[..., compute.Rows], model: nn.Module, data: Sequence[Example]) -> Tensor:
    with torch.no_grad():
        return torch.cat([rows.flatten() for rows in run(model, data)])


def recorded(model: Any, data: Sequence[Example]) -> compute.Rows:
    with record(model):
        return compute.padded(model, data)


def compiled(model: Any, data: Sequence[Example]) -> compute.Rows:
    backend = "inductor" if DEVICE == "cuda" else "aot_eager"
    try:
        return torch.compile(compute.padded, backend=backend, dynamic=False)(model, data)  # type: ignore[no-any-return]
    finally:
        torch.compiler.reset()


def in_half(model: nn.Module, data: Sequence[Example]) -> Tensor:
    """Weights in bfloat16, which inference on a GPU computes by kernels of its own."""
    half = [
        Example(one.source.bfloat16(), None)
        if one.source is not None and one.source.is_floating_point()
        else one
        for one in data
    ]
    model.bfloat16()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fusing, "LARGE", 2)
        found = logits(compute.padded, model, half)
    model.float()
    return found.float()


def gradients(run: Callable[..., compute.Rows], half: bool, model: Any, data: Any) -> Tensor:
    model.zero_grad()
    model.train()
    with torch.autocast(DEVICE, torch.bfloat16, enabled=half):
        loss = sum(rows.float().square().sum() for rows in run(model, data))
    loss.backward()  # type: ignore[union-attr]
    model.eval()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@dataclass(frozen=True)
class Path:
    """A way to run a model, and the plain one that it is compared with."""

    run: Callable[[Any, Any], Tensor]
    plain: Callable[[Any, Any], Tensor]
    tolerance: float
    """Of the difference's norm, as a share of the result's."""
    calls: Callable[[int], range] = lambda count: range(count, count + 1)
    """How often a module may be called that the plain path calls `count` times."""
    kinds: Sequence[str] = tuple(MODELS)
    backward: bool = False
    fused: bool = False


EAGER = partial(logits, compute.padded)
ROUNDING, NARROW = 2e-6, 0.06
TEXTS = [kind for kind in MODELS if kind != "vision"]

PATHS: dict[str, Path] = {
    "packed": Path(partial(logits, compute.packed), EAGER, ROUNDING, kinds=TEXTS),
    "one by one": Path(
        partial(logits, compute.alone),
        EAGER,
        ROUNDING,
        lambda n: range(3 * n, 3 * n + 1),
        ["pre-norm", "vision"],
    ),
    # Once for each of seven tokens; what is read of the source, once for all of them.
    "cached": Path(
        partial(logits, compute.cached), EAGER, ROUNDING, lambda n: range(n, 7 * n + 1), WRITERS
    ),
    "recorded": Path(partial(logits, recorded), EAGER, ROUNDING),
    "training": Path(
        partial(gradients, compute.padded, False),
        partial(gradients, compute.alone, False),
        ROUNDING,
        lambda n: range(n // 3, n // 3 + 1),
        ["vision"],
        backward=True,
    ),
    "training, packed": Path(
        partial(gradients, compute.packed, False),
        partial(gradients, compute.padded, False),
        ROUNDING,
        kinds=TEXTS,
        backward=True,
    ),
}
COMPILED = {"compiled": Path(partial(logits, compiled), EAGER, ROUNDING)}
MIXED = partial(gradients, compute.packed, True)
FUSED: dict[str, Path] = {
    "fused training": Path(MIXED, MIXED, NARROW, kinds=TEXTS, backward=True, fused=True),
    "fused training of images": Path(
        partial(gradients, compute.padded, True),
        partial(gradients, compute.padded, True),
        NARROW,
        kinds=["vision"],
        backward=True,
        fused=True,
    ),
    "fused inference": Path(
        in_half, in_half, NARROW, kinds=["pre-norm", "language", "vision"], fused=True
    ),
}


def table() -> list[Any]:
    """Every path of every model: small ones in `make test`, kernels in `make test-kernels`."""
    interpreted = [pytest.mark.gpu, pytest.mark.triton]
    rows = [(name, kind, []) for name, path in PATHS.items() for kind in path.kinds]
    rows += [
        (name, kind, [pytest.mark.slow]) for name, path in COMPILED.items() for kind in path.kinds
    ]
    rows += [(name, kind, interpreted) for name, path in FUSED.items() for kind in path.kinds]
    return [pytest.param(name, kind, marks=marks) for name, kind, marks in rows]


ALL = PATHS | COMPILED | FUSED
every_path = pytest.mark.parametrize(("name", "kind"), table())
pytestmark = [
    pytest.mark.usefixtures("unchecked"),  # torch.compile cannot see through them
    # Of the first modules, whose inputs are data.
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
]


def compare(have: Tensor, want: Tensor, tolerance: float) -> None:
    assert torch.isfinite(have).all()
    assert (have.double() - want.double()).norm() <= tolerance * want.double().norm()


# Properties


@every_path
def test_results_equal(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, model, data = ALL[name], build(kind), examples(kind)
    with plain():
        want = path.plain(model, data)
    launched: list[str] = []
    if path.fused:
        pytest.importorskip("triton")
        note_launches(monkeypatch, launched)
    compare(path.run(model, data), want, path.tolerance)
    assert bool(launched) == path.fused


def note_launches(monkeypatch: pytest.MonkeyPatch, launched: list[str]) -> None:
    """Notes every kernel that is launched, by its grid."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    for function in (InterpretedFunction, JITFunction):
        launch = function.__getitem__

        def noted(self: Any, grid: Any, launch: Any = launch) -> Any:
            launched.append(str(grid))
            return launch(self, grid)

        monkeypatch.setattr(function, "__getitem__", noted)


HOOKS: dict[str, Callable[[nn.Module, Callable[[], None]], Any]] = {
    "forward": lambda module, see: module.register_forward_hook(lambda *_: see()),
    "forward pre": lambda module, see: module.register_forward_pre_hook(lambda *_: see()),
    "backward": lambda module, see: module.register_full_backward_hook(lambda *_: see()),
    "backward pre": lambda module, see: module.register_full_backward_pre_hook(lambda *_: see()),
}


def count_calls(
    run: Callable[[Any, Any], Tensor], model: nn.Module, data: Any, backward: bool
) -> Counter[tuple[str, str]]:
    """How often each hook of each module fires."""
    counts: Counter[tuple[str, str]] = Counter()
    handles = [
        register(module, partial(counts.update, [(path, hook)]))
        for path, module in model.named_modules()
        for hook, register in HOOKS.items()
        if backward or "backward" not in hook
    ]
    run(model, data)
    for handle in handles:
        handle.remove()
    return counts


@every_path
def test_hooks_fire(name: str, kind: str) -> None:
    path, model, data = ALL[name], build(kind), examples(kind)
    with plain():
        want = count_calls(path.plain, model, data, path.backward)
    have = count_calls(path.run, model, data, path.backward)
    assert len(want) > 20
    if name == "cached":  # by `encode` and `decode`, which are no call of the whole
        for key in [key for key in want if kind != "language" and key[0] == ""]:
            del want[key]
    assert not {key for key, count in want.items() if have[key] not in path.calls(count)}
    assert have.keys() == want.keys()


@every_path
def test_what_a_hook_changes_arrives(name: str, kind: str) -> None:
    path, model, data = ALL[name], build(kind), examples(kind)
    module = model.get_submodule(next(p for p, _ in model.named_modules() if p.endswith("expand")))
    module.register_forward_hook(lambda module, inputs, output: -9 * output)
    with plain():
        want = path.plain(model, data)
    compare(path.run(model, data), want, path.tolerance)


# Paths that replay: a model with hooks is refused


GLOBAL = [registry.register_module_forward_hook, registry.register_module_forward_pre_hook]


def hooked(model: nn.Module) -> list[Callable[[], Any]]:
    """Registers one hook for inference; each of these gives its handle."""
    module = model.get_submodule("decoder.blocks.1.feed_forward.reduce")
    own = [partial(HOOKS[name], module, lambda: None) for name in ("forward", "forward pre")]
    return [*own, *(partial(register, lambda *_: None) for register in GLOBAL)]


@pytest.mark.parametrize("kind", WRITERS)
def test_the_int8_engine_leaves_a_model_with_hooks_to_the_modules(kind: str) -> None:
    from regard.decode.engine.int8.linear import int8

    model = build(kind).cpu()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *_, **__: None)  # that it is slow without a compiler
        model = int8(model)
    if pick(model).name != "int8":
        pytest.skip(pick(model).reason)
    for register in hooked(model):
        handle = register()
        assert (pick(model).name, "hook" in pick(model).reason) == ("eager", True)
        handle.remove()
        assert pick(model).name == "int8"


@pytest.mark.gpu
@pytest.mark.triton
@pytest.mark.parametrize("kind", WRITERS)
def test_the_cuda_engine_refuses_a_model_with_hooks(kind: str) -> None:
    pytest.importorskip("triton")
    from regard.decode.engine.cuda.capture import CudaEngine

    model = build(kind)
    assert CudaEngine.refusal(model) == ""
    engine = CudaEngine(model)
    for register in hooked(model):
        handle = register()
        assert "hook" in CudaEngine.refusal(model)
        assert not engine.current(model)
        handle.remove()
        assert engine.current(model)


class Filled:
    """A task whose batches have a capacity."""

    def __init__(self, model: nn.Module):
        self.model = model

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


@pytest.mark.parametrize("kind", MODELS)
def test_captured_steps_refuse_a_model_with_hooks(kind: str) -> None:
    model = build(kind)
    world: Any = SimpleNamespace(device=torch.device("cuda"), size=1)
    task, config = Filled(model), TrainingConfig()

    def refusal() -> str | None:
        return capture.refusal(task, config, world)  # type: ignore[arg-type]

    assert refusal() is None
    for register in HOOKS.values():
        handle = register(next(iter(model.modules())), lambda: None)
        assert "hook" in (refusal() or "")
        handle.remove()
        assert refusal() is None
