"""Records a model's attention while it runs, and computes the weights on demand.

    with record(model) as recording:
        model(source, target)
    recording["decoder.blocks.3.cross"].weights()       exact, per head, (B, H, L, S)

The fused kernel still runs: only queries, keys and values are kept, and weights are recomputed from
them, for chosen rows. Four attentions are recorded: Regard's MultiHeadAttention, Regard's
`scaled_dot_product_attention`, PyTorch's function of that name, which models of Hugging Face and
timm call, and `nn.MultiheadAttention`. Each entry has the name of the innermost module that calls.
"""

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from regard.attention.core import (
    Core,
    Inputs,
    Observer,
    check_core,
    has_own_weights,
    observe,
    uncompiled,
)
from regard.attention.functional import from_torch, scaled_dot_product_attention
from regard.attention.mask import Mask
from regard.attention.multihead import MultiHeadAttention
from regard.attention.weights import AttentionStatistics, attention_statistics, attention_weights
from regard.synonyms import suggest_names


@dataclass(frozen=True)
class AttentionCall:
    """One recorded call of an attention layer, from which its weights are computed.

        A = softmax(beta · query · keyᵀ + bias, where the mask allows)

    `query` is (B, H, L, K), `key` (B, G, S, K) and `value` (B, G, S, V): H query heads share G key
    heads. A core of your own computes A by its own `weights`.

    >>> import torch
    >>> from regard import MultiHeadAttention, causal, record
    >>> layer = MultiHeadAttention(width=32, heads=4)
    >>> with record(layer) as recording:
    ...     output = layer(torch.randn(2, 5, 32), mask=causal())
    >>> call = recording[""]
    >>> call.weights().shape
    torch.Size([2, 4, 5, 5])
    >>> call.weights(rows=[4]).sum(-1).allclose(torch.ones(2, 4, 1))
    True
    """

    query: Float[Tensor, "B H L K"]
    key: Float[Tensor, "B G S K"]
    mask: Mask | None
    beta: float | int | Tensor | None
    bias: Tensor | None
    value: Tensor | None = None
    """The values that the weights average, (B, G, S, V); None where they are unknown."""
    core: Core | None = None
    """The core whose `weights` are no softmax of β q·k + bias; otherwise None."""
    versions: tuple[int, ...] = ()
    """The versions of the core's tensors."""

    def __repr__(self) -> str:
        """Sizes instead of tensors: queries, keys and the mask."""
        query, key = tuple(self.query.shape), tuple(self.key.shape)
        return f"AttentionCall(query {query}, key {key}, mask {self.mask})"

    def weights(
        self, rows: int | slice | Sequence[int] | Tensor | None = None
    ) -> Float[Tensor, "B H R S"]:
        """The exact weights A, (B, H, R, S), of R chosen queries, by default of all L."""
        if self.core is None:
            return attention_weights(self.query, self.key, self.mask, self.beta, self.bias, rows)
        if _versions(self.core) != self.versions:
            raise ValueError(
                f"the parameters of {type(self.core).__name__} have changed since it was recorded; "
                "compute its weights before an optimizer's step"
            )
        return self.core.weights(self.query, self.key, self.mask, self.bias, rows)

    def statistics(self, topk: int = 4) -> AttentionStatistics:
        """Entropy, top weights and mass received, without the (L, S) matrix of weights."""
        if self.core is not None:
            raise ValueError(
                f"statistics are those of a softmax, which {type(self.core).__name__} is not; "
                "use weights(rows)"
            )
        return attention_statistics(self.query, self.key, self.mask, self.beta, self.bias, topk)

    def overview(self, cells: int = 256, rows: int = 256) -> Float[Tensor, "B H R C"]:
        """The matrix A, reduced to at most `cells` rows and columns.

        A cell sums the weights of its columns and averages over its rows, so that rows still sum
        to 1. A is computed about `rows` rows at a time.
        """
        L = self.query.shape[2]
        down = -(-L // min(L, cells))
        step = down * max(1, rows // down)
        parts = []
        for begin in range(0, L, step):
            part = self._sum_columns(self.weights(slice(begin, min(begin + step, L))), cells)
            parts += [cell.mean(-2, keepdim=True) for cell in part.split(down, -2)]
        return torch.cat(parts, -2)

    def sample(self, cells: int = 256) -> Float[Tensor, "B H R C"]:
        """At most `cells` evenly spaced rows of A, with columns summed in cells.

        Other rows are not computed: of 16,384 tokens, one row in 64 is.
        """
        return self._sum_columns(self.weights(sampled(self.query.shape[2], cells)), cells)

    def _sum_columns(self, part: Tensor, cells: int) -> Tensor:
        S = self.key.shape[2]
        across = -(-S // min(S, cells))
        return F.pad(part, (0, -S % across)).unflatten(-1, (-1, across)).sum(-1)


def sampled(count: int, cells: int) -> list[int]:
    """At most `cells` of the numbers below `count`, evenly spaced, with the last one."""
    step = -(-count // min(count, cells))
    return list(range((count - 1) % step, count, step))


class Recording(dict[str, AttentionCall]):
    """The last call of each attention layer, by the layer's path in the model.

    A dictionary of `AttentionCall`. It prints names and sizes; an unknown name raises a KeyError
    that lists the recorded ones. The model itself is named "" if it calls attention directly.

    >>> import torch
    >>> from regard import LanguageModel, record
    >>> model = LanguageModel.tiny(vocabulary=50)
    >>> with record(model) as recording:
    ...     logits = model(torch.randint(50, (2, 7)))
    >>> list(recording)[0]
    'decoder.blocks.0.attention'
    """

    def __missing__(self, name: str) -> AttentionCall:
        names = ", ".join(known or "'', the model itself" for known in self)
        raise KeyError(f"{name!r} was not recorded; there are {names or 'none'}")

    def __repr__(self) -> str:
        """Names and sizes; weights are computed on demand."""
        rows = ["Recorded: batch × heads × queries × keys"]
        for name, call in self.items():
            sizes = (*call.query.shape[:3], call.key.shape[2])
            rows.append(f"  {name or repr(name)}: {' × '.join(map(str, sizes))}")
        return "\n".join(rows)


@suggest_names
@contextmanager
def record(model: nn.Module, select: Callable[[str], bool] | None = None) -> Iterator[Recording]:
    """Records the attention of any PyTorch model while the block runs.

    Queries, keys and values are kept, and the fused kernels still run; the weights of each layer,
    (B, H, L, S), are computed on demand. `select` receives a layer's path in the model and returns
    whether to record it. Attention is recorded in Regard's layers, in `nn.MultiheadAttention`, and
    wherever `scaled_dot_product_attention` is called, by modules of your own, of Hugging Face
    (`attn_implementation="sdpa"`) or of timm. A block that recorded nothing warns, with the reason.
    Calls in other threads are not recorded.

    >>> import torch
    >>> from regard import record
    >>> layer = torch.nn.TransformerEncoderLayer(32, nhead=4, batch_first=True)
    >>> model = torch.nn.TransformerEncoder(layer, num_layers=2).eval()
    >>> with record(model) as recording:
    ...     output = model(torch.randn(2, 5, 32))
    >>> print(recording)
    Recorded: batch × heads × queries × keys
      layers.0.self_attn: 2 × 4 × 5 × 5
      layers.1.self_attn: 2 × 4 × 5 × 5
    >>> recording["layers.1.self_attn"].weights().shape
    torch.Size([2, 4, 5, 5])
    """
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"record takes a torch.nn.Module, not {type(model).__name__}; of a predictor record "
            "its .model"
        )
    recording = Recording()
    select = select or (lambda name: True)
    observers: dict[nn.Module, Observer] = {}
    for name, module in model.named_modules():
        if isinstance(module, MultiHeadAttention) and select(name):
            check_core(module.core, name)
            if module.core in observers:
                raise ValueError(
                    f"{name} shares its core with another attention, so that their calls cannot be "
                    "told apart; give each a Core of its own, or name one by `select`"
                )
            observers[module.core] = Observer(see=_see(recording, name, module.core))
    torch_calls = _TorchCalls(model, recording, select)
    with observe(observers), torch_calls:
        yield recording
    if not recording:
        warnings.warn(f"nothing was recorded: {torch_calls.reason()}", stacklevel=3)


def _see(recording: Recording, name: str, core: Core) -> Callable[[Inputs], None]:
    def see(inputs: Inputs) -> None:
        query, key, value, mask, bias = inputs
        if has_own_weights(core):
            call = AttentionCall(query, key, mask, None, bias, value, core, _versions(core))
        elif core.score is not None:
            with torch.no_grad():
                query, key, beta, bias = core.score.with_bias(query, key, bias)
            call = AttentionCall(query, key, mask, beta, bias, value)
        else:
            # A learned β is changed in place by an optimizer.
            scale = core.beta.clone() if isinstance(core.beta, Tensor) else core.beta
            call = AttentionCall(query, key, mask, scale, bias, value)
        recording[name] = call

    return see


def _versions(core: Core) -> tuple[int, ...]:
    """The versions of a core's tensors, which count changes in place."""
    tensors = (*core.parameters(), *core.buffers())
    return tuple(tensor._version for tensor in tensors if not tensor.is_inference())


class _TorchCalls(TorchFunctionMode):
    """Records calls of PyTorch's own attention, in any module.

    The call stack names the module: hooks would be shared with other threads and with copies.
    """

    def __init__(self, model: nn.Module, recording: Recording, select: Callable[[str], bool]):
        super().__init__()
        self.model, self.recording, self.select = model, recording, select
        self.names = {module: name for name, module in model.named_modules()}
        self.unselected: dict[str, None] = {}
        """Names of attention layers that were called but not selected."""

    @uncompiled  # so that running modules are on the call stack
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in ATTENTIONS and (name := self._caller()) is not None:
            if not self.select(name):
                self.unselected[name] = None
            elif func is F.multi_head_attention_forward:
                self.recording[name] = _from_module(func, args, kwargs)
            else:
                self.recording[name] = _from_function(*args, **kwargs)
        return func(*args, **kwargs)

    def _caller(self) -> str | None:
        """The name of the innermost running module; None in a Core, which is observed, and in
        another model."""
        running = list(_running_modules())
        if any(isinstance(module, Core) for module in running):
            return None
        names = (self.names[module] for module in running if module in self.names)
        return next(names, None if running else "")

    def reason(self) -> str:
        """Why nothing was recorded, and the remedy."""
        ours = [n for m, n in self.names.items() if isinstance(m, MultiHeadAttention)]
        if waiting := [name for name in ours if self.select(name)]:
            return f"the core of {_quote(waiting)} was not called in this thread by the block"
        if unselected := [*ours, *self.unselected]:
            return f"`select` is False for {_quote(unselected)}"
        for module in self.names:
            config = getattr(module, "config", None)
            implementation = getattr(config, "_attn_implementation", "sdpa")
            if implementation != "sdpa":
                return (
                    f"attn_implementation is {implementation!r}, whose attention is not called by "
                    'name; load the model with attn_implementation="sdpa"'
                )
        return (
            "in this thread no attention was called by name; regard's MultiHeadAttention, "
            "nn.MultiheadAttention and F.scaled_dot_product_attention are recorded, and attention "
            "that is written out as softmax(q @ k.mT) @ v is not"
        )


ATTENTIONS = (
    F.scaled_dot_product_attention,
    F.multi_head_attention_forward,
    scaled_dot_product_attention,
)
CALL = nn.Module._call_impl.__code__


def _running_modules() -> Iterator[nn.Module]:
    """The modules that this thread is running, the innermost first."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is CALL:
            yield frame.f_locals["self"]
        frame = frame.f_back


def _quote(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(repr(name) for name in names[:3]) + more


@torch.no_grad()
def _from_function(*args: Any, **kwargs: Any) -> AttentionCall:
    """The arguments of torch's function under Regard's names, with four axes."""
    query, key, value, mask, beta, bias, _ = from_torch(*args, **kwargs)

    def four(x: Tensor) -> Tensor:
        # Of three axes the first is the batch's, as `attend` has it.
        x = x.detach()
        return x[:, None] if x.ndim == 3 else x.reshape(-1, *((1, 1, *x.shape)[-3:]))

    return AttentionCall(four(query), four(key), mask, beta, bias, four(value))


@torch.no_grad()
def _from_module(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> AttentionCall:
    """`nn.MultiheadAttention` projects inside, but returns its weights A.

    Their logarithm is recorded as a bias: softmax(log A) = A.
    """
    options = {**kwargs, "need_weights": True, "average_attn_weights": False, "training": False}
    _, A = func(*args, **options)
    A = A[None] if A.ndim == 3 else A
    B, H, L, S = A.shape
    return AttentionCall(A.new_zeros(B, H, L, 1), A.new_zeros(B, H, S, 1), None, 1.0, A.log())
