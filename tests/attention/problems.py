"""The problems on which every backend is compared with the formula.

A new mask is added to `MASKS`, and every test that goes over masks takes it up.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.attention.attend import attend, formula
from regard.attention.mask import (
    Mask,
    causal,
    documents,
    four_axes,
    packed,
    padding,
    prefix,
    window,
)


def _lengths(B: int, S: int, draw: Callable[[int], int]) -> list[int]:
    return [draw(S + 1) for _ in range(B)]


def _ids(B: int, S: int, draw: Callable[[int], int]) -> Tensor:
    """Documents as ranges of neighbouring keys."""
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
    """A mask of one's own, as docs/development.md shows it."""
    return Mask(lambda at: (at.query - at.key) % step == 0, f"dilated({step})")


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


TOLERANCE = {
    torch.float64: 1e-11,
    torch.float32: 2e-5,
    torch.bfloat16: 3e-2,
    torch.float16: 4e-3,
}
"""Error allowed in an output or gradient, relative to its largest value or 1."""


@dataclass
class Problem:
    """One call of `attend`, with its answer and gradients by the formula in float64."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Mask | None
    beta: float | None = None
    bias: Tensor | None = None

    def compare(
        self, backend: str, dtype: torch.dtype, device: str = "cpu", training: bool = True
    ) -> None:
        """Fail where `attend` departs from the formula, forwards or backwards."""
        leaves = [
            t.to(device, dtype).requires_grad_(training) for t in (self.query, self.key, self.value)
        ]
        bias = None if self.bias is None else self.bias.to(device, dtype)
        out = attend(*leaves, mask=self.mask, beta=self.beta, bias=bias, backend=backend)
        exact = [t.detach().double().requires_grad_(training) for t in leaves]
        expected = self._formula(*exact, bias)
        close(out, expected, dtype)
        if training:
            seed = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
            have = torch.autograd.grad(out, leaves, seed)
            want = torch.autograd.grad(expected, exact, seed.double())
            for mine, right in zip(have, want):
                close(mine, right, dtype)

    def _formula(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        L, S = q.shape[2], k.shape[2]
        allowed = None if self.mask is None else self.mask.tensor(L, S, q.device)
        beta = q.shape[-1] ** -0.5 if self.beta is None else self.beta
        wide = None if bias is None else four_axes(bias.double(), "bias")
        return formula(q, k, v, allowed, beta, wide)


def close(have: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    assert have.dtype == dtype
    scale = max(1.0, want.abs().max().item()) if want.numel() else 1.0
    torch.testing.assert_close(have.double(), want, atol=TOLERANCE[dtype] * scale, rtol=0)


def expresses(backend: str, mask: Mask | None) -> bool:
    """Whether the backend has a form for the mask; "auto", "formula" and "sdpa" always have."""
    return backend != "packed" or (mask is not None and bool(mask.ranges))


def problem(
    name: str, B: int, G: int, H: int, L: int, S: int, K: int, V: int, seed: int = 0
) -> Problem:
    """A mask of this name over random vectors; packed batches have one row, documents L <= S."""
    B = 1 if "packed" in name else B
    L = min(L, S) if "documents" in name else L
    numbers = torch.Generator().manual_seed(seed)

    def draw(n: int) -> int:
        return int(torch.randint(n, (), generator=numbers))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=numbers, dtype=torch.float64)

    mask = MASKS[name](B, H, L, S, draw)
    return Problem(normal(B, H, L, K), normal(B, G, S, K), normal(B, G, S, V), mask)
