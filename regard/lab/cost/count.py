"""A counter of arithmetic that sits beneath torch, where every operator comes by.

    m x k times k x n     m·n·k multiply-adds, of which m·n·(k - 1) additions
    fused attention       L·S·(K + V) multiply-adds for each head, and the softmax's sums

It knows the fused kernels by name, where torch's own counter passes over the CPU's attention and
recurrence in silence. What looks like a product and is not known is refused rather than missed.
Under `without_memory()` operators are dispatched as on a CPU, but no number is stored or computed:
a model of any size can be run and counted.
"""

import math
from collections import Counter as Tally
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class Counts:
    """Operations on single numbers."""

    multiply_adds: int = 0
    """Multiplications inside products of matrices, convolutions and attention."""
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
    """Counts what is executed inside `with Counter() as counter:`, forwards and backwards."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = Counts()
        self.parts: dict[str, Counts] = {}
        """By the names given to `within`."""
        self.products: Tally[str] = Tally()
        """Which operators multiplied, and how often."""
        self.chain = 0
        """The most products of which each waits for the one before."""
        self._names: list[str] = []
        # Products behind each tensor's storage, and the storages, so that no address comes twice.
        self._behind: dict[int, int] = {}
        self._storages: list[object] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled while it is counted, and asking would import the compiler.
        return False

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """What is counted meanwhile belongs to a part, too."""
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
        # Fused attention is two products, of which the second waits for the first.
        steps = 0 if rule is None else 2 if "attention" in short else 1
        self._extend((args, kwargs), results, steps)
        return out

    def _extend(self, given: object, results: list[Tensor], steps: int) -> None:
        """The results come after whatever they were made from."""
        behind = max((self._behind.get(_storage(t), 0) for t in _tensors(given)), default=0) + steps
        for tensor in results:
            self._storages.append(tensor.untyped_storage())
            at = _storage(tensor)
            self._behind[at] = max(behind, self._behind.get(at, 0))
        self.chain = max(self.chain, behind)


def counted(run: Callable[[], object]) -> Counter:
    """Runs something, and counts."""
    with Counter() as counter:
        run()
    return counter


@contextmanager
def without_memory() -> Iterator[None]:
    """Tensors made inside have a shape and a type, but no numbers."""
    with FakeTensorMode():
        yield


# What each operator costs

Rule = Callable[[tuple[Any, ...], list[Tensor]], Counts]


def _sums(entries: int, terms: int, more: int = 0) -> Counts:
    """So many numbers, each a sum of so many products."""
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
    """Scores once more, and the gradients of values, weights, queries and keys."""
    above, query, key, value = args[:4]
    B, H, L, K = query.shape
    S, V = key.shape[2], value.shape[3]
    pairs = B * H * L * S
    return Counts(pairs * (3 * K + 2 * V), pairs * (3 * K + 2 * V), 4 * pairs)


def _recurrent(args: tuple[Any, ...], out: list[Tensor]) -> Counts:
    x, weight, recurrent = args[:3]
    steps = x.shape[0] * x.shape[1]
    return _sums(steps * weight.shape[0], weight.shape[1] + recurrent.shape[1])


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
    """Everything that is no product; indices and masks, which are not floating, are free."""
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
        # The mean, the centred numbers, their squares' mean, and the bias.
        width = math.prod(args[1])
        rows = result.numel() // max(width, 1)
        return Counts(additions=rows * (4 * width - 1), others=3 * result.numel())
    pointwise = torch.Tag.pointwise in getattr(func, "tags", ())
    return Counts(others=result.numel()) if pointwise else Counts()


def _storage(tensor: Tensor) -> int:
    # The storage itself rather than its address, which is 0 where there are no numbers.
    return tensor.untyped_storage()._cdata


def _tensors(given: object) -> list[Tensor]:
    """All tensors in nested arguments."""
    if isinstance(given, Tensor):
        return [given]
    if isinstance(given, dict):
        given = tuple(given.values())
    if isinstance(given, tuple | list):
        return [tensor for part in given for tensor in _tensors(part)]
    return []
