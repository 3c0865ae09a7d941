"""The properties of any PyTorch module, measured on example inputs.

The model is copied, so that whatever its forward pass does, the caller's model stays as it is.
"""

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map_only

from regard.attention.core import Core, Inputs, observe
from regard.checks.attention import RecordedOutputs, by_formula, core_observers, record_or_skip
from regard.checks.finding import Measured, Property, SkipError
from regard.checks.isolation import copy_model, exact_products, global_hooks
from regard.checks.properties import ROUNDING, same_tensors, state
from regard.machine.processes import one_line

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of `forward`."""

MAX_ALONE = 4
"""Examples of a batch that are computed alone."""


class ModuleSubject:
    """A copy of a module in evaluation mode, with example inputs and its output for them."""

    def __init__(
        self,
        model: nn.Module,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        batch_axis: int | None,
    ):
        kind = type(model).__name__
        if any(map(is_lazy, _tensors(model))):
            raise ValueError(f"{kind} has lazy layers without shapes; call it once, then check it")
        self.batch_axis = batch_axis
        self.model = copy_model(model)
        self.inputs: Arguments = tree_map_only(Tensor, Tensor.detach, (tuple(args), dict(kwargs)))
        if not tree_leaves(self.inputs):
            raise ValueError(
                f"{kind} needs example inputs, as its forward takes them: check(model, x)"
            )
        if any(part.dtype in (torch.float16, torch.bfloat16) for part in _tensors(self.model)):
            self.model.float()
            self.inputs = _cast(self.inputs, torch.float32)
        self.unused = copy_model(self.model)
        try:
            with torch.no_grad():
                self.output = self.run()
        except Exception as error:
            message = f"{type(error).__name__}: {one_line(error)}"
            raise ValueError(f"{kind} does not run on these inputs: {message}") from error
        if not self.output:
            raise ValueError(
                f"{kind} returns no floating-point tensor to compare; return tensors, or tuples, "
                "lists or dictionaries of them"
            )

    def copy(self) -> nn.Module:
        return copy_model(self.model)

    def run(
        self, model: Callable[..., Any] | None = None, inputs: Arguments | None = None
    ) -> dict[str, Tensor]:
        """The floating-point and complex tensors of the output, by their place in it.

        The inputs are cloned, since a forward pass may change them in place.
        """
        args, kwargs = tree_map_only(
            Tensor, Tensor.clone, self.inputs if inputs is None else inputs
        )
        with exact_products():
            output = (self.model if model is None else model)(*args, **kwargs)
        return {
            keystr(path): _real(part).clone()
            for path, part in tree_flatten_with_path(output)[0]
            if isinstance(part, Tensor) and _has_numbers(part)
        }

    def gradients(self, model: nn.Module) -> dict[str, Tensor]:
        """Gradients of a random projection of the output, for parameters and inputs."""
        model.zero_grad()
        chance = torch.Generator().manual_seed(0)
        with torch.enable_grad():
            leaves = tree_map_only(
                Tensor,
                lambda part: part.detach().requires_grad_(_has_numbers(part)),
                self.inputs,
            )
            output = [part for part in self.run(model, leaves).values() if part.requires_grad]
            if not output:
                raise SkipError("the output depends on no parameter and no input that is a number")
            loss = torch.zeros((), dtype=torch.float64)
            for part in output:
                factors = torch.randn(part.shape, generator=chance).to(part)
                finite = part.masked_fill(~part.isfinite(), 0)
                loss = loss + (finite * factors).sum().double().cpu()
            with exact_products():
                loss.backward()
        named = {**dict(model.named_parameters()), **_tensors_of(leaves)}
        return {
            name: _real(part.grad).clone() for name, part in named.items() if part.grad is not None
        }

    @cached_property
    def batch(self) -> int | None:
        """The number of examples: the size of the first tensor's batch axis."""
        sizes = [part.shape for part in _tensors_of(self.inputs).values()]
        axis = self.batch_axis or 0
        return sizes[0][axis] if sizes and len(sizes[0]) > axis else None

    @property
    def count(self) -> int:
        return self.batch or 1

    @property
    def origin(self) -> str:
        shapes = [f"{tuple(part.shape)}" for part in _tensors_of(self.inputs).values()]
        return f"inputs of {', '.join(shapes)}"


def _has_numbers(part: Tensor) -> bool:
    """True for tensors that are compared up to rounding."""
    return part.is_floating_point() or part.is_complex()


def _real(part: Tensor) -> Tensor:
    """A complex tensor as real and imaginary parts, along a last axis of 2."""
    return torch.view_as_real(part.resolve_conj()) if part.is_complex() else part


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _tensors_of(inputs: object) -> dict[str, Tensor]:
    """The tensors among the inputs, by their place."""
    flat, _ = tree_flatten_with_path(inputs)
    return {f"input{keystr(path)}": part for path, part in flat if isinstance(part, Tensor)}


def _cast(inputs: Arguments, dtype: torch.dtype) -> Arguments:
    cast: Arguments = tree_map_only(
        Tensor, lambda part: part.to(dtype) if part.is_floating_point() else part, inputs
    )
    return cast


def _compare(
    have: Mapping[str, Tensor], want: Mapping[str, Tensor], of: str = "output"
) -> Measured:
    """The largest difference, as a share of the largest number of its tensor.

    Where all numbers of a tensor are far smaller than the others', as gradients of key biases are,
    which are 0 up to rounding, it is a share of a hundredth of the largest of all.
    """
    if have.keys() != want.keys():
        names = ", ".join(sorted(have.keys() ^ want.keys())[:3])
        return Measured(math.inf, f"only one of the two ways has {names or 'it'}")
    if shapes := [name for name in want if have[name].shape != want[name].shape]:
        name = shapes[0]
        shape, expected = tuple(have[name].shape), tuple(want[name].shape)
        return Measured(math.inf, f"{of}{name} is of shape {shape} instead of {expected}")
    sizes = {name: _size(part) for name, part in want.items()}
    floor = max(sizes.values(), default=0.0) / 100
    shares = [_gap(have[name], want[name]) / (max(sizes[name], floor) or 1.0) for name in want]
    count = sum(part.numel() for part in want.values())
    largest = torch.tensor(shares).max() if shares else 0.0  # NaN where one is
    return Measured(float(largest), f"{count:,} numbers of the {of}, as a share of the largest")


def _size(part: Tensor) -> float:
    finite = part[part.isfinite()].abs()
    return float(finite.max()) if len(finite) else 0.0


def _gap(have: Tensor, want: Tensor) -> float:
    have, want = have.detach().double().cpu(), want.detach().double().cpu()
    gaps = torch.where(have == want, 0.0, (have - want).abs())  # infinities may be equal
    return float(gaps.max()) if gaps.numel() else 0.0


def fused_formula(subject: ModuleSubject) -> Measured:
    with by_formula(subject.model):
        output = subject.run()
    return _compare(output, subject.output)


def recorded_unrecorded(subject: ModuleSubject) -> Measured:
    with record_or_skip(subject.model):
        output = subject.run()
    return _compare(output, subject.output)


def weights_output(subject: ModuleSubject) -> Measured:
    with record_or_skip(subject.model) as recording:
        calls = RecordedOutputs(recording)

        def see(name: str, core: Core, inputs: Inputs, output: Tensor) -> Tensor:
            calls.compare(name, recording[name], output)
            return output

        with observe(core_observers(subject.model, see)), calls:
            subject.run()
    return _compare(calls.have, calls.want, f"output of attention (calls: {len(calls.want)})")


# The whole module


def batch_alone(subject: ModuleSubject) -> Measured:
    transposed = [
        name for name, part in subject.model.named_modules()
        if getattr(part, "batch_first", True) is False
    ]  # fmt: skip
    if subject.batch_axis is None and transposed:
        raise SkipError(
            f"{transposed[0] or type(subject.model).__name__} has batch_first=False; name the "
            "batch's axis, such as check(model, x, batch_axis=1)"
        )
    axis, count = subject.batch_axis or 0, subject.batch
    if count is None or count < 2:
        raise SkipError("the batch has one example; give two or more")

    def has_batch(part: Tensor) -> bool:
        return part.ndim > axis and part.shape[axis] == count

    def example(n: int, part: Tensor) -> Tensor:
        return part.narrow(axis, n, 1) if has_batch(part) else part

    batched = {name: part for name, part in subject.output.items() if has_batch(part)}
    if not batched:
        raise SkipError(f"no output has {count} examples along axis {axis}")
    have, want = {}, {}
    for n in range(min(count, MAX_ALONE)):
        alone = subject.run(inputs=tree_map_only(Tensor, partial(example, n), subject.inputs))
        for name, part in batched.items():
            want[f"{name} of example {n}"] = example(n, part)
            have[f"{name} of example {n}"] = alone[name]
    return _compare(have, want, f"output for {min(count, MAX_ALONE)} examples")


def again_first(subject: ModuleSubject) -> Measured:
    return _compare(subject.run(), subject.run())


def gradless_graded(subject: ModuleSubject) -> Measured:
    with torch.enable_grad():
        output = subject.run(subject.copy())
    return _compare(output, subject.output)


def gradients_formula(subject: ModuleSubject) -> Measured:
    fused, model = subject.gradients(subject.copy()), subject.copy()
    with by_formula(model):
        exact = subject.gradients(model)
    return _compare(fused, exact, f"gradients of {len(exact)} tensors")


def gradients_again(subject: ModuleSubject) -> Measured:
    first, again = (subject.gradients(subject.copy()) for _ in range(2))
    return _compare(again, first, f"gradients of {len(first)} tensors")


def float32_float64(subject: ModuleSubject) -> Measured:
    if any(part.dtype == torch.float64 for part in subject.output.values()):
        raise SkipError("the output is in float64 already")
    try:
        wide = subject.run(subject.copy().double(), _cast(subject.inputs, torch.float64))
    except Exception as error:
        raise SkipError(f"it does not run in float64: {one_line(error)[:200]}") from error
    if any(part.dtype != torch.float64 for part in wide.values()):
        raise SkipError("it converts its numbers to float32 itself")
    return _compare(subject.output, wide)


def hooks_fire(subject: ModuleSubject) -> Measured:
    """Hooks fire as often without gradients as with, and a layer that is used is called."""
    model, calls = subject.copy(), Counter[str]()
    layers = dict(model.named_modules())
    for name, layer in layers.items():
        layer.register_forward_hook(lambda *_, name=name: calls.update([name]))
    try:
        gradients = subject.gradients(model)
    except SkipError:
        gradients = {}
        subject.run(model)
    with_gradients = calls.copy()
    calls.clear()
    subject.run(model)
    missing = {name for name in layers if calls[name] != with_gradients[name]}
    used = {id(part) for name, part in model.named_parameters() if name in gradients}
    called = {
        id(part) for name in with_gradients for part in layers[name].parameters(recurse=False)
    }
    inside = {
        id(part)
        for layer in layers.values()
        if isinstance(layer, nn.MultiheadAttention | nn.ParameterList | nn.ParameterDict)
        for part in layer.parameters()
    }  # read by their owner, as PyTorch documents
    for name, layer in layers.items():
        direct = {id(part) for part in layer.parameters(recurse=False)}
        if (direct & used) - called - inside:
            missing.add(name)
    words = f": {', '.join(sorted(missing)[:3])}" if missing else ""
    return Measured(float(len(missing)), f"missing calls of hooks on {len(layers)} modules{words}")


def loaded_saved(subject: ModuleSubject) -> Measured:
    """A copy whose state is overwritten computes the same once the saved one is loaded."""
    if hidden := _unregistered_parameters(subject.model):
        return Measured(math.inf, f"parameters that are not in the state dict: {hidden}")
    loaded, saved = subject.copy(), copy.deepcopy(subject.model.state_dict())
    for part in tree_leaves(loaded.state_dict()):
        if isinstance(part, Tensor):
            part.zero_()
    loaded.load_state_dict(saved)
    return _compare(subject.run(loaded), subject.run())


def _unregistered_parameters(model: nn.Module) -> str:
    """The first attribute that holds parameters which are not registered."""
    registered = {id(part) for part in (*model.parameters(), *model.modules())}
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute in ("_parameters", "_modules"):
                continue
            parts = [part for part in tree_leaves(value) if isinstance(part, nn.Parameter)]
            for inner in tree_leaves(value):
                if isinstance(inner, nn.Module) and id(inner) not in registered:
                    parts += inner.parameters()
            if any(id(part) not in registered for part in parts):
                return f"{name}.{attribute}".lstrip(".")
    return ""


def evaluation_changes_nothing(subject: ModuleSubject) -> Measured:
    model = copy_model(subject.unused)
    weights, before = state(model), _settings(model)
    inputs = tree_map_only(Tensor, Tensor.clone, subject.inputs)
    args, kwargs = inputs
    model(*args, **kwargs)
    after = _settings(model)
    for name, value in before.items():
        if after[name] != value:
            return Measured(math.inf, name)
    for name, part in _tensors_of(subject.inputs).items():
        if not torch.equal(part, _tensors_of(inputs)[name]):
            return Measured(math.inf, f"{name} is changed in place")
    return same_tensors(weights, state(model), "tensors of weights")


def _settings(model: nn.Module) -> dict[str, object]:
    """The state that a forward pass in evaluation mode leaves alone, beside the weights."""
    hooks = [
        len(registry)
        for module in model.modules()
        for name, registry in vars(module).items()
        if name.endswith("_hooks") and isinstance(registry, dict)
    ]
    return {
        "hooks are registered or removed": (hooks, [*map(len, global_hooks())]),
        "modules switch between training and evaluation": [m.training for m in model.modules()],
        "requires_grad changes": [part.requires_grad for part in model.parameters()],
        "random numbers are drawn": torch.get_rng_state().tolist(),
    }


def compiled_eager(subject: ModuleSubject) -> Measured:
    try:
        compiled = torch.compile(subject.copy(), backend="aot_eager", dynamic=False)
        output = subject.run(compiled)
    finally:
        torch.compiler.reset()
    return _compare(output, subject.output)


DEEP = 1e-3
"""Of float32 against float64: rounding grows with the layers."""

KERNELS = "pass the same mask, scale and dropout_p=0.0 in evaluation mode to every kernel"
FAST = (
    "it differs on a fast path of inference; of nn.TransformerEncoder with padding, pass "
    "enable_nested_tensor=False"
)
BATCH = "compute each example from its own rows; the batch size must differ from other sizes"

PROPERTIES = (
    Property("fused = formula", ROUNDING, KERNELS, fused_formula),
    Property("recorded = unrecorded", ROUNDING, FAST, recorded_unrecorded),
    Property("weights × values = output", ROUNDING, KERNELS, weights_output),
    Property("batch = one by one", ROUNDING, BATCH, batch_alone),
    Property(
        "again = first", 0.0, "draw no random numbers and keep no state in evaluation", again_first
    ),
    Property("no_grad = grad", ROUNDING, FAST, gradless_graded),
    Property("gradients: fused = formula", ROUNDING, KERNELS, gradients_formula),
    Property("gradients: again = first", ROUNDING, "keep no state in evaluation", gradients_again),
    Property("float32 ≈ float64", DEEP, "train and use it in float64, or rescale", float32_float64),
    Property("hooks fire", 0.0, "call layers instead of reading their weights", hooks_fire),
    Property("loaded = saved", 0.0, "register parameters, buffers and modules", loaded_saved),
    Property(
        "evaluation changes nothing",
        0.0,
        "do not write to weights, inputs, hooks or modes in forward",
        evaluation_changes_nothing,
    ),
    Property(
        "compiled = eager", ROUNDING, "use it without torch.compile", compiled_eager, default=False
    ),
)
"""Of any module; compilation takes seconds, and is measured where it is named."""
