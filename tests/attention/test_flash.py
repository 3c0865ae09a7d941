"""How problems are handed to FlashAttention's kernel, with a stand-in for the kernel itself.

The stand-in does what the kernel documents, in plain torch: so the offsets, layouts and windows are
checked where there is no CUDA. The kernel itself is compared in test_gpu.py.
"""

import pytest
import torch
from torch import Tensor

from regard.attention.arguments import arguments
from regard.attention.attend import formula
from regard.attention.backends import Call, flash
from regard.attention.mask import Mask, PackedLengths, causal, documents, packed, padding, window
from regard.attention.plan import _packed_plan_on_cuda
from tests.attention.problems import close


def stand_in(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets_q: Tensor | None,
    offsets_k: Tensor | None,
    longest_q: int,
    longest_k: int,
    edges: tuple[int, int],
    beta: float,
    dropout: float,
) -> Tensor:
    if offsets_q is None or offsets_k is None:
        pairs = zip(q, k, v)
        return torch.stack([one(*each, edges, beta) for each in pairs])
    assert longest_q >= int(offsets_q.diff().max())
    assert longest_k >= int(offsets_k.diff().max())
    out = torch.full_like(q, torch.nan)
    for i in range(len(offsets_q) - 1):
        rows = slice(int(offsets_q[i]), int(offsets_q[i + 1]))
        keys = slice(int(offsets_k[i]), int(offsets_k[i + 1]))
        out[rows] = one(q[rows], k[keys], v[keys], edges, beta)
    return out


def one(q: Tensor, k: Tensor, v: Tensor, edges: tuple[int, int], beta: float) -> Tensor:
    """One sequence (L, H, K), within a window that is aligned at the bottom right."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    L, S = q.shape[1], k.shape[1]
    distance = torch.arange(S) - torch.arange(L)[:, None] - (S - L)
    left, right = edges
    seen = torch.ones(L, S, dtype=torch.bool)
    if left >= 0:
        seen &= distance >= -left
    if right >= 0:
        seen &= distance <= right
    return formula(q, k, v, seen, beta).transpose(0, 1)


CASES: list[tuple[Mask, int, int, int]] = [
    (causal(), 2, 7, 11),
    (causal(), 2, 11, 7),
    (window(2, 1), 2, 7, 11),
    (causal() & window(3), 2, 11, 11),
    (padding([11, 0, 4]), 3, 7, 11),
    (padding([5]), 3, 7, 11),
    (packed([3, 0, 4], [5, 6, 0]), 1, 7, 11),
    (packed(PackedLengths([3, 4]), PackedLengths([5, 6])) & causal(), 1, 7, 11),
    (packed([3, 8]) & window(2, 1), 1, 11, 11),
    (documents([[0] * 4 + [1] * 7, [5] * 11]), 2, 11, 11),
    (causal() & documents([2] * 3 + [0] * 8), 2, 11, 11),
]


@pytest.mark.parametrize(("mask", "B", "L", "S"), CASES, ids=[str(case[0]) for case in CASES])
@pytest.mark.parametrize("by_head", [True, False], ids=["(B, H, L, K)", "(B, L, H, K)"])
@pytest.mark.parametrize("G", [2, 4])
def test_offsets_and_layouts(
    mask: Mask, B: int, L: int, S: int, by_head: bool, G: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash, "_flash", stand_in)

    def vectors(heads: int, length: int, width: int) -> Tensor:
        shape = (B, heads, length, width) if by_head else (B, length, heads, width)
        made = torch.randn(shape, dtype=torch.float64)
        return made if by_head else made.transpose(1, 2)

    q, k, v = vectors(4, L, 5), vectors(G, S, 5), vectors(G, S, 3)
    plan = _packed_plan_on_cuda(mask, arguments(q, k, v, mask, None, None))
    assert plan is not None
    route = {"band": flash.band, "lengths": flash.packed, "padding": flash.padded}[plan.route]
    out = route(Call(q, k, v, mask, 0.5, None, 0.0))
    whole = (t.repeat_interleave(4 // G, 1) for t in (k, v))
    close(out, formula(q, *whole, mask.tensor(L, S), 0.5), torch.float64)
