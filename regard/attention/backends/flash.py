"""FlashAttention's kernel on CUDA, called for what SDPA does not offer: a band of keys around each

query, bottom-right alignment, and sequences of different lengths without padding.
"""

import torch
from torch import Tensor

from regard.attention.backends import Call
from regard.attention.backends.sdpa import fit
from regard.attention.mask import Band, Documents, Mask, PackedLengths, Padding


def band(call: Call) -> Tensor:
    """A causal mask or a window, aligned at the bottom right."""
    query, key, value, mask, beta, bias, dropout = call
    assert mask is not None
    L, S, V = query.shape[2], key.shape[2], value.shape[-1]
    q, k, v = (t.transpose(1, 2) for t in fit(query, key, value, same=True))
    out = _flash(q, k, v, None, None, L, S, edges(mask), beta, dropout)
    return out[..., :V].transpose(1, 2)


def packed(call: Call) -> Tensor:
    """Sequences laid end to end, with a band inside each if the mask holds one."""
    query, key, value, mask, beta, bias, dropout = call
    assert mask is not None
    B, H, L, _ = query.shape
    V = value.shape[-1]
    queries, sources = sequences(mask, B, query.device)
    q, k, v = (_tokens(t) for t in fit(query, key, value, same=True))
    out = _flash(
        q,
        k,
        v,
        queries.offsets,
        sources.offsets,
        queries.longest,
        sources.longest,
        edges(mask),
        beta,
        dropout,
    )
    return out[..., :V].view(B, L, H, V).transpose(1, 2)


def padded(call: Call) -> Tensor:
    """A padded batch, read as a packed one without moving anything.

    Sentence b becomes two sequences: all its queries with its real keys, and no queries with its
    padding. The kernel skips the second.
    """
    query, key, value, mask, beta, bias, dropout = call
    assert mask is not None
    B, H, L, _ = query.shape
    S, V = key.shape[2], value.shape[-1]
    (padding,) = mask.parts
    assert isinstance(padding, Padding)
    q, k, v = fit(query, key, value, same=True)
    by_head = query.stride(1) > query.stride(2) and key.shape[1] == H
    rows = H if by_head else 1  # laid out by heads, each head is a sequence of its own

    def build() -> tuple[Tensor, Tensor]:
        lengths = padding.lengths.to(query.device).to(torch.int32).expand(B)
        lengths = lengths.repeat_interleave(rows, output_size=B * rows)
        begin = torch.arange(B * rows, device=query.device, dtype=torch.int32)
        pairs_q = torch.stack([(begin + 1) * L, (begin + 1) * L], 1).flatten()
        pairs_k = torch.stack([begin * S + lengths, (begin + 1) * S], 1).flatten()
        zero = begin.new_zeros(1)
        return torch.cat([zero, pairs_q]), torch.cat([zero, pairs_k])

    offsets_q, offsets_k = mask.cached("doubled", (B, rows, L, S, query.device), build)
    if by_head:
        q, k, v = (t.reshape(-1, 1, t.shape[-1]) for t in (q, k, v))
    else:
        q, k, v = (_tokens(t) for t in (q, k, v))
    out = _flash(q, k, v, offsets_q, offsets_k, L, S, (-1, -1), beta, dropout)[..., :V]
    return out.view(B, H, L, V) if by_head else out.view(B, L, H, V).transpose(1, 2)


def edges(mask: Mask) -> tuple[int, int]:
    """How far before and after its position a query sees, by all bands together; -1: no limit."""
    bands = [part for part in mask.parts if isinstance(part, Band)]
    left = [b.left for b in bands if b.left is not None]
    right = [b.right for b in bands]
    # Not min(…, default=-1), at which torch.compile gives up.
    return min(left) if left else -1, min(right) if right else -1


def sequences(mask: Mask, B: int, device: torch.device) -> tuple[PackedLengths, PackedLengths]:
    """The sequences of a packed mask, or the documents of one whose documents are ranges."""
    packing = mask.packing
    if packing is not None:
        moved = packing.query.to(device), packing.source.to(device)
        return mask.cached("lengths", device, lambda: moved)
    (documents,) = (part for part in mask.parts if isinstance(part, Documents))

    def build() -> tuple[PackedLengths, PackedLengths]:
        assert documents.edges is not None
        first, last = documents.edges
        begins = first == torch.arange(first.shape[1])
        lengths = PackedLengths((last - first)[begins].repeat(B // len(first)), device)
        return lengths, lengths

    return mask.cached("lengths", (B, device), build)


def _tokens(t: Tensor) -> Tensor:
    B, H, L, K = t.shape
    return t.transpose(1, 2).reshape(B * L, H, K)


def _flash(
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
    left, right = edges
    # With one query per sequence and grouped heads the kernel takes every sequence to have one,
    # even those that have none; a longest of 2 keeps it from that.
    if offsets_q is not None and q.shape[1] != k.shape[1]:
        longest_q = max(longest_q, 2)
    out: Tensor = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        offsets_q,
        offsets_k,
        longest_q,
        longest_k,
        dropout,
        (left, right) == (-1, 0),
        False,
        scale=beta,
        window_size_left=left,
        window_size_right=right,
    )[0]
    return out
