"""The operation between the projections of an attention, and its observers.

A model may be shared by threads, copied and saved while its attention is recorded or changed. So
observers are not hooks of its modules: each `Core` looks up those of the calling thread. Other
threads run undisturbed, with their fast engines, and nothing is left in the model.

    with observe({attention.core: Observer(see=print)}):
        model(x)
"""

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeAlias, TypeVar

import torch
import torch.nn.modules.module
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import noop_context_fn

from regard.attention.attend import attend
from regard.attention.mask import Mask
from regard.attention.score import AlignmentScore
from regard.attention.weights import attention_weights

P = ParamSpec("P")
T = TypeVar("T")


class Inputs(NamedTuple):
    """The arguments of a core."""

    query: Float[Tensor, "*b H L K"]
    key: Float[Tensor, "*b G S K"]
    value: Float[Tensor, "*b G S V"]
    mask: Mask | None = None
    bias: Float[Tensor, "..."] | None = None


class Observer(NamedTuple):
    """Functions that are called around a core.

    All changes come first, then the core's own forward pre-hooks, and then `see`, which receives
    exactly what `forward` receives.
    """

    change: Callable[[Inputs], Inputs] | None = None
    see: Callable[[Inputs], None] | None = None
    change_output: Callable[[Tensor], Tensor] | None = None


Observers: TypeAlias = Mapping[nn.Module, Observer]
ContextFunction: TypeAlias = Callable[
    [], tuple[AbstractContextManager[None], AbstractContextManager[None]]
]


class _Thread(threading.local):
    """The observers of one thread, in the order in which they were added."""

    def __init__(self) -> None:
        self.observers: list[Observers] = []


_thread = _Thread()


@contextmanager
def observe(observers: Observers) -> Iterator[None]:
    """Observes cores while the block runs, in this thread only."""
    active = _thread.observers
    active.append(observers)
    try:
        yield
    finally:  # blocks may end in any order
        active[:] = [entry for entry in active if entry is not observers]


def is_observed(model: nn.Module) -> bool:
    """True if this thread observes a core of the model."""
    active = _thread.observers
    return bool(active) and any(part in entry for part in model.modules() for entry in active)


def recomputation() -> ContextFunction:
    """The `context_fn` of a checkpointed forward pass: changes apply to its recomputation as well.

    The backward pass may recompute in another thread, or after the block. Nothing is seen again.
    """
    if not _thread.observers:
        return noop_context_fn
    changes: list[Observers] = [
        {core: observer._replace(see=None) for core, observer in entry.items()}
        for entry in _thread.observers
    ]

    @contextmanager
    def repeat_changes() -> Iterator[None]:
        before, _thread.observers = _thread.observers, changes
        try:
            yield
        finally:
            _thread.observers = before

    return lambda: (nullcontext(), repeat_changes())


def uncompiled(function: Callable[P, T]) -> Callable[P, T]:
    """`torch.compiler.disable`, which takes seconds to import, for code in which others compile."""

    disabled: Callable[P, T] | None = None

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        nonlocal disabled
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if disabled is None:
            reason = "attention is recorded or changed; compile the model without fullgraph=True"
            disabled = torch.compiler.disable(function, reason=reason)
        return disabled(*args, **kwargs)

    return run


class Core(nn.Module):
    """The operation itself, between the projections: softmax(β q·k + bias) v.

    A subclass that overrides `forward` also overrides `weights`, so that it can be recorded.
    """

    def __init__(
        self,
        score: AlignmentScore | None = None,
        beta: float | int | Tensor | None = None,
        dropout: float | int = 0.0,
    ):
        super().__init__()
        self.score = score
        self.dropout = dropout
        # A tensor moves and is saved with the module, whether it is learned or given.
        if isinstance(beta, Tensor) and not isinstance(beta, nn.Parameter):
            self.register_buffer("beta", beta)
        else:
            self.beta = beta

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not _thread.observers:
            return super().__call__(*args, **kwargs)
        return _call_observed(self, args, kwargs)

    def forward(
        self,
        query: Float[Tensor, "*b H L K"],
        key: Float[Tensor, "*b G S K"],
        value: Float[Tensor, "*b G S V"],
        mask: Mask | None = None,
        bias: Float[Tensor, "..."] | None = None,
    ) -> Float[Tensor, "*b H L V"]:
        dropout = self.dropout if self.training else 0.0
        if self.score is not None:
            return self.score.attend(query, key, value, mask=mask, bias=bias, dropout=dropout)
        return attend(query, key, value, mask=mask, beta=self.beta, bias=bias, dropout=dropout)

    def weights(
        self,
        query: Float[Tensor, "*b H L K"],
        key: Float[Tensor, "*b G S K"],
        mask: Mask | None = None,
        bias: Float[Tensor, "..."] | None = None,
        rows: int | slice | Sequence[int] | Tensor | None = None,
    ) -> Float[Tensor, "*b H R S"]:
        """The A of `forward`'s A V without dropout, for the chosen rows, or all."""
        beta = self.beta
        if self.score is not None:
            query, key, beta, bias = self.score.with_bias(query, key, bias)
        return attention_weights(query, key, mask, beta, bias, rows)

    def extra_repr(self) -> str:
        beta = "a tensor" if isinstance(self.beta, Tensor) else self.beta
        return f"beta={beta}, dropout={self.dropout}"


def check_core(core: nn.Module, name: str, weights: bool = True) -> None:
    """Refuses a core that cannot be observed, or with `weights` one whose weights are unknown."""
    kind, path = type(core).__name__, f"{name}.core".lstrip(".")
    if not isinstance(core, Core):
        raise ValueError(
            f"{path} ({kind}) is not a Core, so its attention cannot be recorded or changed; "
            f"derive {kind} from regard.attention.core.Core, with forward and weights"
        )
    if weights and not _has_its_weights(core):
        raise ValueError(
            f"{path} ({kind}) overrides forward without weights, so its attention weights are "
            f"unknown; give {kind} a method weights(query, key, mask, bias, rows)"
        )
    score = core.score
    if weights and score is not None and not has_own_weights(core) and _attends(score):
        raise ValueError(
            f"{path}.score ({type(score).__name__}) overrides attend, so its attention weights are "
            "unknown; override forward or project instead"
        )


def has_own_weights(core: Core) -> bool:
    """True if the weights are not those of `Core` itself."""
    return "weights" in vars(core) or type(core).weights is not Core.weights


def _has_its_weights(core: Core) -> bool:
    """True unless `forward` was overridden more recently than `weights`."""
    spaces = [vars(core), *map(vars, type(core).__mro__)]
    return next("weights" in space for space in spaces if {"forward", "weights"} & space.keys())


def _attends(score: AlignmentScore) -> bool:
    return "attend" in vars(score) or type(score).attend is not AlignmentScore.attend


@uncompiled
def _call_observed(core: Core, args: Any, kwargs: Any) -> Any:
    observers = [entry[core] for entry in _thread.observers if core in entry]
    if not observers:
        return nn.Module.__call__(core, *args, **kwargs)
    inputs = Inputs(*args, **kwargs)
    for observer in observers:
        if observer.change:
            inputs = observer.change(inputs)
    run: nn.Module = core
    if see := [observer.see for observer in observers if observer.see]:
        if core._forward_pre_hooks or torch.nn.modules.module._global_forward_pre_hooks:
            run = _double(core, see)
        else:
            _call(see, inputs)
    output = nn.Module.__call__(run, *inputs[:3], mask=inputs.mask, bias=inputs.bias)
    for observer in observers:
        if observer.change_output:
            output = observer.change_output(output)
    return output


def _call(see: Sequence[Callable[[Inputs], None]], inputs: Inputs) -> None:
    for function in see:
        function(inputs)


def _double(core: Core, see: Sequence[Callable[[Inputs], None]]) -> nn.Module:
    """A module with the core's state and hooks, whose forward is seen.

    Forward pre-hooks may replace the inputs, and only `forward` receives the result.
    """

    def forward(*args: Any, **kwargs: Any) -> Any:
        _call(see, Inputs(*args, **kwargs))
        return core.forward(*args, **kwargs)

    kind = type(core)
    double: nn.Module = object.__new__(
        type(kind.__name__, (kind,), {"forward": property(lambda _: forward)})
    )
    double.__dict__ = core.__dict__
    return double
