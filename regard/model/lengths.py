"""The lengths of a batch's sequences, and the masks and positions that follow from them.

    None             every row is a whole sequence
    lengths (B,)     a padded batch: row b holds lengths[b] tokens, and then padding
    Packed(lengths)  a packed batch, (1, T): all sequences end to end, without padding

Padding is never guessed from token ids.

The library's parts leave a row for each row. A custom source or encoder that makes more or fewer
(latents, pooling, a convolution with a stride) has a method that gives the lengths it leaves:

    def lengths(self, lengths: Int[Tensor, "B"]) -> Int[Tensor, "B"]
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

from torch import Tensor, nn

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
    inside = packed(lengths) if isinstance(lengths, Packed) else padding(lengths)
    return inside if near is None else near & inside


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


def keeps_lengths(part: nn.Module) -> bool:
    """True if the part runs the library's own code, which leaves a row for each row."""
    part = _original(part)
    library = type(part).forward.__module__.startswith("regard.")
    return library and "forward" not in vars(part) and not _has_lengths(part)


def lengths_after(part: nn.Module, lengths: Lengths) -> Lengths:
    """The lengths that a part leaves of sequences of these lengths."""
    if lengths is None or keeps_lengths(part):
        return lengths
    changing: Any = _original(part)
    if not _has_lengths(changing):
        raise ValueError(
            f"{type(changing).__name__} may change the number of rows, so lengths need a method "
            "lengths(lengths) on it, which returns those that it leaves; return them as they are "
            "if it keeps every row"
        )
    counts = lengths.lengths if isinstance(lengths, Packed) else integer_tensor(lengths, "lengths")
    after: Tensor = changing.lengths(counts)
    if after is counts:
        return lengths
    return Packed(after, lengths.offsets.device) if isinstance(lengths, Packed) else after


def _original(part: nn.Module) -> nn.Module:
    """The part that torch.compile wrapped."""
    return getattr(part, "_orig_mod", part)


def _has_lengths(part: nn.Module) -> bool:
    return "lengths" in vars(part) or hasattr(type(part), "lengths")


def checked_lengths(part: nn.Module, lengths: Lengths, rows: int | None, out: Tensor) -> Lengths:
    """The same, checked against the part's output; `rows` of its input, None if unknown."""
    after = lengths_after(part, lengths)
    if lengths is not None and after is lengths and rows not in (None, out.shape[1]):
        raise ValueError(
            f"{type(part).__name__} made {out.shape[1]} rows of {rows}, so lengths need a method "
            "lengths(lengths) on it, which returns those that it leaves"
        )
    if after is not lengths:
        check_lengths(after, out)
    return after


def places(lengths: Lengths, rows: Tensor) -> Positions:
    """The positions of tokens, from 0 in each row, or in each packed sequence."""
    check_lengths(lengths, rows)
    return lengths.to(rows.device).positions() if isinstance(lengths, Packed) else 0


def check_lengths(lengths: Lengths, rows: Tensor) -> None:
    """Raises if the rows are no batch, or the lengths do not fit them."""
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
