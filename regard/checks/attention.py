"""Attention of any module by its formula, and beside its recorded weights."""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from regard.attention.core import Core, Inputs, Observer, check_core, observe
from regard.attention.functional import scaled_dot_product_attention
from regard.attention.multihead import MultiHeadAttention
from regard.checks.finding import SkipError
from regard.look.record import ATTENTIONS, AttentionCall, Recording, record
from regard.machine.processes import one_line


def formula(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(scale · q kᵀ + attn_mask) v in float64, without dropout; 0 for rows without keys."""
    q, k, v = query.double(), key.double(), value.double()
    if enable_gqa:
        k, v = (part.repeat_interleave(q.shape[-3] // part.shape[-3], -3) for part in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    empty = (scores == -math.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(empty, 0).softmax(-1).masked_fill(empty, 0)
    return (weights @ v).to(query.dtype)


class _Formula(TorchFunctionMode):
    """Computes PyTorch's attention by its formula, and counts the calls."""

    calls = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (F.scaled_dot_product_attention, scaled_dot_product_attention):
            self.calls += 1
            return formula(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            self.calls += 1
            output, weights = func(*args, **{**kwargs, "need_weights": True})
            return output, weights if kwargs.get("need_weights", True) else None
        return func(*args, **kwargs)


@contextmanager
def by_formula(model: nn.Module) -> Iterator[None]:
    """Computes all attention of the model by its formula, without fused kernels.

    A block that computed none is skipped.
    """
    functions = _Formula()

    def replace(name: str, core: Core, inputs: Inputs, output: Tensor) -> Tensor:
        functions.calls += 1
        query, key, value, mask, bias = inputs
        return _average(core.weights(query, key, mask, bias), value).reshape(output.shape)

    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with observe(core_observers(model, replace)), sdpa_kernel(SDPBackend.MATH), functions:
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    if not functions.calls:
        raise SkipError("no attention was called by name, such as F.scaled_dot_product_attention")


def _average(weights: Tensor, value: Tensor) -> Tensor:
    """weights · value, where several query heads share a head of values."""
    H, G = weights.shape[-3], value.shape[-3]
    return weights @ (value.repeat_interleave(H // G, -3) if G != H else value)


def core_observers(
    model: nn.Module, change: Callable[[str, Core, Inputs, Tensor], Tensor]
) -> dict[nn.Module, Observer]:
    """Observers of the cores of Regard's attention layers that know their weights."""
    observers: dict[nn.Module, Observer] = {}
    for name, module in model.named_modules():
        if not isinstance(module, MultiHeadAttention):
            continue
        try:
            check_core(module.core, name)
        except ValueError:
            continue
        calls: list[Inputs] = []
        observers[module.core] = Observer(
            see=calls.append,
            change_output=partial(_change, change, name, module.core, calls),
        )
    return observers


def _change(
    change: Callable[[str, Core, Inputs, Tensor], Tensor],
    name: str,
    core: Core,
    calls: list[Inputs],
    output: Tensor,
) -> Tensor:
    return change(name, core, calls.pop(), output)


@contextmanager
def record_or_skip(model: nn.Module) -> Iterator[Recording]:
    """A recording that is skipped, with the reason, if it is empty or refused."""
    with ExitStack() as stack:
        try:
            recording = stack.enter_context(record(model))
        except ValueError as error:
            raise SkipError(one_line(error)) from error
        yield recording
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="nothing was recorded")
            try:
                stack.close()
            except UserWarning as warning:
                raise SkipError(str(warning).removeprefix("nothing was recorded: ")) from warning


class RecordedOutputs(TorchFunctionMode):
    """Compares each output of PyTorch's attention with its recorded weights and values."""

    def __init__(self, recording: Recording):
        super().__init__()
        self.recording = recording
        self.have: dict[str, Tensor] = {}
        self.want: dict[str, Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        before = dict(self.recording) if func in ATTENTIONS else {}
        output = func(*args, **kwargs)
        if func not in ATTENTIONS:
            return output
        for name, call in self.recording.items():
            if call is before.get(name):
                continue
            if func is F.multi_head_attention_forward:  # it projects the values itself
                exact, _ = func(*args, **{**kwargs, "need_weights": True})
                self._add(name, exact, output[0])
            else:
                self.compare(name, call, output)
            break
        return output

    def compare(self, name: str, call: AttentionCall, output: Tensor) -> None:
        assert call.value is not None
        self._add(name, _average(call.weights(), call.value).reshape(output.shape), output)

    def _add(self, name: str, have: Tensor, want: Tensor) -> None:
        place = f"{name} #{len(self.have)}"  # a layer may be called several times
        self.have[place], self.want[place] = have, want
