"""The problems on which every backend is compared with the formula.

A new mask is added to `MASKS`, and every test that goes over masks takes it up.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from regard.attention.attend import formula
from regard.attention.mask import (
    Mask,
    causal,
    documents,
    packed,
    padding,
    prefix,
    window,
)

Numbers = torch.Generator


def _lengths(B: int, S: int, draw: Callable[[int], int]) -> list[int]:
    return [draw(S + 1) for _ in range(B)]


def _ids(B: int, S: int, draw: Callable[[int], int]) -> Tensor:
    """Documents as runs of neighbouring keys."""
    return torch.tensor([sorted(draw(5) for _ in range(S)) for _ in range(B)]).view(B, S)


def _split(total: int, pieces: int, draw: Callable[[int], int]) -> list[int]:
    """`pieces` lengths, some of them perhaps zero, that add up to `total`."""
    cuts = sorted(draw(total + 1) for _ in range(pieces - 1))
    return [b - a for a, b in zip([0, *cuts], [*cuts, total])]


def _packed(L: int, S: int, draw: Callable[[int], int]) -> Mask:
    return packed(_split(L, 3, draw), _split(S, 3, draw))


def _checkers(B: int, H: int, L: int, S: int, draw: Callable[[int], int]) -> Tensor:
    cells = [draw(4) > 0 for _ in range(7)]
    index = torch.arange(B * H * L * S) * 5
    return torch.tensor(cells)[index % 7].view(B, H, L, S)


def dilated(step: int) -> Mask:
    """A mask of one's own, as CONTRIBUTING.md shows it."""
    return Mask(lambda at: (at.position - at.key) % step == 0, f"dilated({step})")


MASKS: dict[str, Callable[[int, int, int, int, Callable[[int], int]], Mask | None]] = {
    "none": lambda B, H, L, S, draw: None,
    "causal": lambda B, H, L, S, draw: causal(),
    "causal with offset": lambda B, H, L, S, draw: causal(draw(S + 3) - 1),
    "causal with offset on device": lambda B, H, L, S, draw: causal(torch.tensor(draw(S + 1))),
    "causal with offsets": lambda B, H, L, S, draw: causal(torch.tensor(_lengths(B, S, draw))),
    "padding": lambda B, H, L, S, draw: padding(_lengths(B, S, draw)),
    "causal & padding": lambda B, H, L, S, draw: causal() & padding(_lengths(B, S, draw)),
    "window": lambda B, H, L, S, draw: window(draw(4), draw(4)),
    "causal & window": lambda B, H, L, S, draw: causal() & window(draw(4)),
    "window & padding": lambda B, H, L, S, draw: window(2, 1) & padding(_lengths(B, S, draw)),
    "prefix": lambda B, H, L, S, draw: prefix(draw(S + 1)),
    "causal | prefix": lambda B, H, L, S, draw: causal() | prefix(draw(S + 1)),
    "causal | prefixes": lambda B, H, L, S, draw: causal() | prefix(_lengths(B, S, draw)),
    "documents": lambda B, H, L, S, draw: documents(_ids(B, S, draw)),
    "causal & documents": lambda B, H, L, S, draw: causal() & documents(_ids(1, S, draw)),
    "documents in pieces": lambda B, H, L, S, draw: documents(
        _ids(B, S, draw)[:, torch.arange(S) * 7 % S if S % 7 else slice(None)]
    ),
    "not causal": lambda B, H, L, S, draw: ~causal(),
    "tensor": lambda B, H, L, S, draw: Mask.from_tensor(_checkers(B, H, L, S, draw)),
    "tensor (L, S)": lambda B, H, L, S, draw: Mask.from_tensor(_checkers(1, 1, L, S, draw)[0, 0]),
    "tensor (B, L, S)": lambda B, H, L, S, draw: Mask.from_tensor(
        _checkers(B, 1, L, S, draw)[:, 0]
    ),
    "tensor & causal": lambda B, H, L, S, draw: (
        Mask.from_tensor(_checkers(B, 1, L, S, draw)) & causal()
    ),
    "packed": lambda B, H, L, S, draw: _packed(L, S, draw),
    "packed & causal": lambda B, H, L, S, draw: _packed(L, S, draw) & causal(),
    "packed & window": lambda B, H, L, S, draw: window(2, 1) & _packed(L, S, draw),
    "packed & (causal | prefix)": lambda B, H, L, S, draw: (
        _packed(L, S, draw) & (causal() | prefix(2))
    ),
    "a rule of one's own": lambda B, H, L, S, draw: dilated(3),
    "own rule & packed": lambda B, H, L, S, draw: dilated(2) & _packed(L, S, draw),
}


def one_sentence(name: str) -> bool:
    return "packed" in name


def needs_no_more_queries_than_keys(name: str) -> bool:
    return "documents" in name


@dataclass
class Problem:
    """One call of `attend`, with its answer and gradients by the formula in float64."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Mask | None
    name: str
    beta: float | Tensor | None = None
    bias: Tensor | None = None

    def inputs(self, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
        return [
            t.to(device=device, dtype=dtype).detach().requires_grad_()
            for t in (self.query, self.key, self.value)
        ]

    def expected(self, inputs: list[Tensor], seed: Tensor) -> list[Tensor]:
        """Output and gradients in float64, from the inputs as rounded to their dtype."""
        q, k, v = leaves = [t.detach().double().cpu().requires_grad_() for t in inputs]
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        L, S = q.shape[2], k.shape[2]
        allowed = None if self.mask is None else self.mask.tensor(L, S)
        beta = self.beta
        if beta is None:
            beta = q.shape[-1] ** -0.5
        if isinstance(beta, Tensor):
            beta = beta.double().cpu()[:, None, None]
        bias = None if self.bias is None else self.bias.double().cpu()
        out = formula(q, k, v, allowed, beta, bias)
        return [out, *torch.autograd.grad(out, leaves, seed.double().cpu())]


Sizes = tuple[str, int, int, int, int, int, int, int, int]
"""Arguments of `problem`: the mask's name, B, G, H, L, S, K, V and a seed."""


@st.composite
def sizes(draw_from: st.DrawFn, names: list[str] | None = None, most: int = 13) -> Sizes:
    """A mask of any kind over any shape, lengths of 1 and sequences of nothing included."""
    name = draw_from(st.sampled_from(names or sorted(MASKS)))
    length = st.integers(1, most)
    B = 1 if one_sentence(name) else draw_from(st.sampled_from([1, 2, 3]))
    G = draw_from(st.sampled_from([1, 2, 3]))
    H = G * draw_from(st.sampled_from([1, 2]))
    L, S = draw_from(length), draw_from(length)
    if needs_no_more_queries_than_keys(name):
        L = min(L, S)
    K, V = draw_from(st.sampled_from([1, 3, 5, 8])), draw_from(st.sampled_from([1, 2, 5, 8]))
    seed = draw_from(st.integers(0, 2**20))
    return name, B, G, H, L, S, K, V, seed


def problem(
    name: str, B: int, G: int, H: int, L: int, S: int, K: int, V: int, seed: int = 0
) -> Problem:
    numbers = torch.Generator().manual_seed(seed)

    def draw(n: int) -> int:
        return int(torch.randint(n, (), generator=numbers))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=numbers, dtype=torch.float64)

    return Problem(
        normal(B, H, L, K),
        normal(B, G, S, K),
        normal(B, G, S, V),
        MASKS[name](B, H, L, S, draw),
        name,
    )


def each_mask(B: int, H: int, L: int, S: int) -> Iterator[tuple[str, Mask | None]]:
    for name in MASKS:
        yield name, problem(name, 1 if one_sentence(name) else B, H, H, L, S, 2, 2).mask
