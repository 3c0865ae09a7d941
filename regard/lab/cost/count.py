"""Counts arithmetic beneath torch, in a dispatch mode through which every operator passes.

    m x k times k x n     m·n·k multiply-adds, of which m·n·(k - 1) additions
    fused attention       L·S·(K + V) multiply-adds for each head, and the softmax's sums

It knows the fused kernels by name; torch's FlopCounterMode silently skips the CPU's attention and
recurrence. An unknown operator that looks like a product is an error, so that none is missed.
Under `without_memory()` tensors are fake: operators are dispatched as on a CPU, but nothing is
stored or computed, so a model of any size can be run and counted.
"""

import math
from collections import Counter as Tally
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class Counts:
    """Operations on single numbers."""

    multiply_adds: int = 0
    """Multiplications in matrix products, convolutions and attention."""
    additions: int = 0
    """All additions: k - 1 for a sum of k products, biases, residual sums, the softmax's sums."""
    others: int = 0
    """Multiplications, divisions and functions of single numbers, such as exponentials."""

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(
            self.multiply_adds + other.multiply_adds,
            self.additions + other.additions,
            self.others + other.others,
        )


class Counter(TorchDispatchMode):
    """Counts what runs inside `with Counter() as counter:`, forward and backward."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = Counts()
        self.parts: dict[str, Counts] = {}
        """By the name passed to `within`."""
        self.products: Tally[str] = Tally()
        """How often each product operator ran."""
        self.chain = 0
        """Products on the longest chain in which each needs the result of the one before."""
        self._names: list[str] = []
        # The chain behind each storage. Storages are kept alive so that no address is reused.
        self._behind: dict[int, int] = {}
        self._storages: list[object] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled while counting, and the default imports the compiler to find out.
        return False

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """What runs inside is also counted for this part."""
        self.enter(name)
        try:
            yield
        finally:
            self.leave()

    def enter(self, name: str) -> None:
        self._names.append(name)

    def leave(self) -> None:
        self._names.pop()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        results = _tensors(out)
        if not results:
            return out
        name = func.name() if isinstance(func, torch._ops.OpOverload) else str(func)
        short = name.partition("::")[2].partition(".")[0]
        rule = PRODUCTS.get(short)
        if rule is not None:
            counts = rule(args, results)
            self.products[short] += 1
        elif name.startswith("regard::") or _like_a_product(short):
            raise ValueError(
                f"{name} looks like a product, but the counter does not know it; count with "
                "backend='sdpa' or 'formula'"
            )
        else:
            counts = _elementwise(short, func, args, results)
        self.total += counts
        if self._names:
            part = self._names[-1]
            self.parts[part] = self.parts.get(part, Counts()) + counts
        # Fused attention is two products, one after the other.
        steps = 0 if rule is None else 2 if "attention" in short else 1
        self._extend((args, kwargs), results, steps)
        return out

    def _extend(self, inputs: object, results: list[Tensor], steps: int) -> None:
        """The chain behind the results is the longest behind their inputs, plus these steps."""
        chains = (self._behind.get(_storage(tensor), 0) for tensor in _tensors(inputs))
        behind = max(chains, default=0) + steps
        for tensor in results:
            self._storages.append(tensor.untyped_storage())
            at = _storage(tensor)
            self._behind[at] = max(behind, self._behind.get(at, 0))
        self.chain = max(self.chain, behind)


def counted(run: Callable[[], object]) -> Counter:
    """Runs a function and counts its operations."""
    with Counter() as counter:
        run()
    return counter


@contextmanager
def without_memory() -> Iterator[None]:
    """Tensors made inside are fake: a shape and a dtype without values."""
    with FakeTensorMode():
        yield


class Saved:
    """What autograd saves for the backward pass."""

    def __init__(self) -> None:
        self.bytes = 0
        self.numbers = 0


@contextmanager
def saved_tensors(module: nn.Module) -> Iterator[Saved]:
    """Sums up the storages that autograd saves meanwhile, each once; parameters are left out."""
    saved = Saved()
    # Storages are kept alive so that no address is reused.
    seen: dict[int, object] = {_storage(parameter): parameter for parameter in module.parameters()}

    def save(tensor: Tensor) -> Tensor:
        if _storage(tensor) not in seen:
            storage = tensor.untyped_storage()
            seen[_storage(tensor)] = storage
            saved.bytes += storage.nbytes()
            saved.numbers += storage.nbytes() // tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        yield saved


# What each operator costs

Rule = Callable[[tuple[Any, ...], list[Tensor]], Counts]


def _sums(entries: int, terms: int, more: int = 0) -> Counts:
    """`entries` numbers, each a sum of `terms` products, and `more` additions."""
    return Counts(entries * terms, entries * max(terms - 1, 0) + more)


def _mm(args: tuple[Any, ...], out: list[Tensor]) -> Counts:
    return _sums(out[0].numel(), args[0].shape[-1])


def _addmm(args: tuple[Any, ...], out: list[Tensor]) -> Counts:
    return _sums(out[0].numel(), args[1].shape[-1], more=out[0].numel())


def _convolution(args: tuple[Any, ...], out: list[Tensor]) -> Counts:
    x, weight, bias, *_ = args
    transposed = bool(args[6])
    entries = x.numel() if transposed else out[0].numel()
    biases = 0 if bias is None else out[0].numel()
    return _sums(entries, math.prod(weight.shape[1:]), more=biases)


def _convolution_backward(args: tuple[Any, ...], out: list[Tensor]) -> Counts:
    above, x, weight = args[:3]
    wanted = args[10]
    once = above.numel() * math.prod(weight.shape[1:])
    pieces = [t.numel() for t, asked in ((x, wanted[0]), (weight, wanted[1])) if asked]
    return Counts(len(pieces) * once, sum(once - piece for piece in pieces))


def _attention(query: Tensor, key: Tensor, value: Tensor) -> Counts:
    B, H, L, K = query.shape
    S, V = key.shape[2], value.shape[3]
    rows = B * H * L
    softmax = Counts(0, rows * max(S - 1, 0), 3 * rows * S)  # scaled, exponential, divided
    return _sums(rows * S, K) + softmax + _sums(rows * V, S)


def _attention_forward(args: tuple[Any, ...], out: list[Tensor]) -> Counts:
    return _attention(*args[:3])


def _attention_backward(args: tuple[Any, ...], out: list[Tensor]) -> Counts:
    """Recomputed scores, and the gradients of values, weights, queries and keys."""
    above, query, key, value = args[:4]
    B, H, L, K = query.shape
    S, V = key.shape[2], value.shape[3]
    pairs = B * H * L * S
    return Counts(pairs * (3 * K + 2 * V), pairs * (3 * K + 2 * V), 4 * pairs)


def _recurrent(args: tuple[Any, ...], out: list[Tensor]) -> Counts:
    x, weight, recurrent = args[:3]
    steps = x.shape[0] * x.shape[1]
    return _sums(steps * weight.shape[0], weight.shape[1] + recurrent.shape[1])


def _recurrent_backward(args: tuple[Any, ...], out: list[Tensor]) -> Counts:
    """Gradients of what goes into each step, input and state, and of both matrices."""
    x, weight, recurrent = args[:3]
    steps, read = x.shape[0] * x.shape[1], weight.shape[1] + recurrent.shape[1]
    once = steps * weight.shape[0] * read
    return Counts(2 * once, 2 * once - steps * read - weight.numel() - recurrent.numel())


PRODUCTS: dict[str, Rule] = {
    "mm": _mm,
    "bmm": _mm,
    "mv": _mm,
    "dot": _mm,
    "addmm": _addmm,
    "baddbmm": _addmm,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "mkldnn_rnn_layer": _recurrent,
    "mkldnn_rnn_layer_backward": _recurrent_backward,
    "_scaled_dot_product_flash_attention_for_cpu": _attention_forward,
    "_scaled_dot_product_flash_attention": _attention_forward,
    "_scaled_dot_product_efficient_attention": _attention_forward,
    "_scaled_dot_product_cudnn_attention": _attention_forward,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "_scaled_dot_product_flash_attention_backward": _attention_backward,
    "_scaled_dot_product_efficient_attention_backward": _attention_backward,
    "_scaled_dot_product_cudnn_attention_backward": _attention_backward,
}
"""Operators that multiply matrices, by name."""

_SIGNS = ("attention", "matmul", "rnn", "lstm", "gru", "conv", "linear", "einsum", "addr", "ger")


def _like_a_product(name: str) -> bool:
    words = name.strip("_").split("_")
    return any(word.startswith(_SIGNS) or word.endswith(("mm", "mv")) for word in words)


_SUMS = ("add", "add_", "sub", "sub_", "rsub", "cumsum")
_FREE = ("clone", "copy_", "_to_copy", "where", "masked_fill", "masked_fill_", "fill_", "zero_")


def _elementwise(name: str, func: Any, args: tuple[Any, ...], out: list[Tensor]) -> Counts:
    """Operators that are no product. Integers and booleans, indices and masks, cost nothing."""
    result = out[0]
    if not result.is_floating_point() or name in _FREE:
        return Counts()
    if name in _SUMS:
        return Counts(additions=result.numel())
    if name in ("sum", "mean"):
        return Counts(additions=args[0].numel() - result.numel())
    if name in ("_softmax", "_safe_softmax"):
        rows = result.numel() // max(result.shape[args[1]], 1)
        return Counts(additions=result.numel() - rows, others=2 * result.numel())
    if name == "native_layer_norm":
        # The mean, the centred numbers, the mean of their squares, and the bias.
        width = math.prod(args[1])
        rows = result.numel() // max(width, 1)
        return Counts(additions=rows * (4 * width - 1), others=3 * result.numel())
    pointwise = torch.Tag.pointwise in getattr(func, "tags", ())
    return Counts(others=result.numel()) if pointwise else Counts()


def _storage(tensor: Tensor) -> int:
    # The storage object, not its data pointer: that of a fake tensor is 0.
    return tensor.untyped_storage()._cdata


def _tensors(nested: object) -> list[Tensor]:
    """All tensors in nested arguments."""
    if isinstance(nested, Tensor):
        return [nested]
    if isinstance(nested, dict):
        nested = tuple(nested.values())
    if isinstance(nested, tuple | list):
        return [tensor for part in nested for tensor in _tensors(part)]
    return []
