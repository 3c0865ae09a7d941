"""How a batch says how long its sequences are, and what follows for masks and positions.

    None             every row is a whole sequence
    lengths (B,)     a padded batch: row b holds lengths[b] tokens, and then padding
    Packed(lengths)  a packed batch, (1, T): all sequences end to end, without padding

Padding is never guessed from token ids.
"""

from collections.abc import Sequence
from typing import TypeAlias

from torch import Tensor

from regard.attention.checks import integer_tensor, shown
from regard.attention.mask import Mask, Packed, causal, packed, padding, window
from regard.attention.position import Positions
from regard.attention.sync import on_host

Lengths: TypeAlias = Packed | Tensor | Sequence[int] | None


def own_mask(lengths: Lengths, reach: int | None = None) -> Mask | None:
    """For self-attention: each token sees the tokens of its own sequence, `reach` to either side
    where there is a window."""
    near = None if reach is None else window(reach)
    if lengths is None:
        return near
    own = packed(lengths) if isinstance(lengths, Packed) else padding(lengths)
    return own if near is None else near & own


def causal_mask(lengths: Lengths, reach: int | None = None) -> Mask:
    """For a decoder's self-attention: each token sees itself and those before it, or `reach` of
    them.

    Padding comes after the real tokens, where a causal mask hides it already: masking it as well
    would only cost the fast kernel.
    """
    before = causal() if reach is None else window(reach, 0)
    return before & packed(lengths) if isinstance(lengths, Packed) else before


def cross_attended(
    memory: Tensor | None, target: Lengths, source: Lengths
) -> tuple[Tensor | None, Mask | None]:
    """The memory as cross-attention reads it, and its mask: each token sees its own source.

    Packed targets may read unpacked memories of one size, such as images: laid end to end, those
    are packed too.
    """
    if isinstance(target, Packed) and source is None and memory is not None:
        B, S = memory.shape[:2]
        memory, source = memory.flatten(0, 1)[None], Packed.even(B, S, memory.device)
    if isinstance(target, Packed) != isinstance(source, Packed):
        kinds = [type(lengths).__name__ for lengths in (target, source)]
        raise ValueError(
            f"target_lengths ({kinds[0]}) and source_lengths ({kinds[1]}) must both be Packed, "
            "or neither; pack the other as well"
        )
    if isinstance(target, Packed) and isinstance(source, Packed):
        if len(target) != len(source):
            raise ValueError(
                f"packed targets ({len(target)}) need as many packed sources ({len(source)}); "
                "an empty sequence has length 0"
            )
        return memory, packed(target, source)
    return memory, own_mask(source)


def places(lengths: Lengths, rows: Tensor) -> Positions:
    """Where tokens stand: positions start at 0 in each row, or in each packed sequence."""
    check_lengths(lengths, rows)
    return lengths.to(rows.device).positions() if isinstance(lengths, Packed) else 0


def check_lengths(lengths: Lengths, rows: Tensor) -> None:
    """Refuses what is no batch, and lengths that are not its own."""
    if not isinstance(rows, Tensor):
        raise ValueError(f"a batch must be a tensor, got {shown(rows)}; use torch.tensor([ids])")
    if lengths is not None and rows.ndim in (2, 3):  # an image's rows are its patches
        _check(lengths, *rows.shape[:2])


def _check(lengths: Packed | Tensor | Sequence[int], B: int, L: int) -> None:
    if isinstance(lengths, Packed):
        if B != 1 or lengths.total != L:
            raise ValueError(
                f"{lengths} adds up to {lengths.total} tokens, but the batch has {B} rows of {L}; "
                f"lay the sequences end to end in one row of {lengths.total}"
            )
        return
    counts = integer_tensor(lengths, "lengths")
    if len(counts) != B:
        raise ValueError(f"{len(counts)} lengths for a batch of {B}; pass one for each sentence")
    if on_host(counts) and B and int(counts.max()) > L:
        raise ValueError(
            f"a length ({int(counts.max())}) is longer than the batch's rows ({L}); pass the "
            "number of real tokens of each sentence"
        )
