"""The lengths of the sequences in a batch, and the masks and positions that follow from them.

    None             every row is a whole sequence
    lengths (B,)     a padded batch: row b holds lengths[b] tokens, and then padding
    PackedLengths(lengths)  a packed batch, (1, T): all sequences end to end, without padding

Padding is never guessed from token ids.

The library's parts keep every row. A custom source or encoder that returns more or fewer rows
(latents, pooling, a convolution with a stride) has a method that returns the new lengths:

    def lengths(self, lengths: Int[Tensor, "B"]) -> Int[Tensor, "B"]
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

from torch import Tensor, nn

from regard.attention.checks import broadcasts, integer_tensor, shown
from regard.attention.mask import Mask, PackedLengths, causal, packed, padding, window
from regard.attention.position import Positions
from regard.attention.sync import on_host

Lengths: TypeAlias = PackedLengths | Tensor | Sequence[int] | None


def own_mask(lengths: Lengths, reach: int | None = None) -> Mask | None:
    """The mask of self-attention: each token sees the tokens of its own sequence, within a window
    of `reach` to either side if there is one."""
    near = None if reach is None else window(reach)
    if lengths is None:
        return near
    mask = packed(lengths) if isinstance(lengths, PackedLengths) else padding(lengths)
    return mask if near is None else near & mask


def causal_mask(lengths: Lengths, reach: int | None = None) -> Mask:
    """The mask of a decoder's self-attention: each token sees itself and those before it, at most
    `reach` of them.

    Padding comes after the real tokens, where a causal mask hides it already: masking it as well
    would only cost the fast kernel.
    """
    before = causal() if reach is None else window(reach, 0)
    return before & packed(lengths) if isinstance(lengths, PackedLengths) else before


def memory_and_mask(
    memory: Tensor | None, target: Lengths, source: Lengths
) -> tuple[Tensor | None, Mask | None]:
    """The memory as cross-attention reads it, and its mask: each token sees its own source.

    Packed targets may read unpacked memories of one size, such as images, which are packed here.
    """
    if isinstance(target, PackedLengths) and source is None and memory is not None:
        B, S = memory.shape[:2]
        memory, source = memory.flatten(0, 1)[None], PackedLengths.even(B, S, memory.device)
    if isinstance(target, PackedLengths) != isinstance(source, PackedLengths):
        kinds = [type(lengths).__name__ for lengths in (target, source)]
        raise ValueError(
            f"target_lengths ({kinds[0]}) and source_lengths ({kinds[1]}) must both be "
            "PackedLengths, or neither; pack the other as well"
        )
    if isinstance(target, PackedLengths) and isinstance(source, PackedLengths):
        if len(target) != len(source):
            raise ValueError(
                f"packed targets ({len(target)}) need as many packed sources ({len(source)}); "
                "an empty sequence has length 0"
            )
        return memory, packed(target, source)
    return memory, own_mask(source)


def keeps_lengths(part: nn.Module) -> bool:
    """True if the part runs the library's own code, which keeps every row."""
    part = _unwrap(part)
    library = type(part).forward.__module__.startswith("regard.")
    return library and "forward" not in vars(part) and not _has_lengths(part)


def lengths_after(part: nn.Module, lengths: Lengths) -> Lengths:
    """The lengths of a part's output, for sequences of these lengths."""
    if lengths is None or keeps_lengths(part):
        return lengths
    changing: Any = _unwrap(part)
    if not _has_lengths(changing):
        raise ValueError(
            f"{type(changing).__name__} may change the number of rows, so lengths need a method "
            "lengths(lengths) on it, which returns those that it leaves; return them as they are "
            "if it keeps every row"
        )
    counts = (
        lengths.lengths
        if isinstance(lengths, PackedLengths)
        else integer_tensor(lengths, "lengths")
    )
    after: Tensor = changing.lengths(counts)
    if after is counts:
        return lengths
    return (
        PackedLengths(after, lengths.offsets.device)
        if isinstance(lengths, PackedLengths)
        else after
    )


def _unwrap(part: nn.Module) -> nn.Module:
    """The part itself, if torch.compile has wrapped it."""
    return getattr(part, "_orig_mod", part)


def _has_lengths(part: nn.Module) -> bool:
    return "lengths" in vars(part) or hasattr(type(part), "lengths")


def checked_lengths(part: nn.Module, lengths: Lengths, rows: int | None, out: Tensor) -> Lengths:
    """`lengths_after`, checked against the part's output; `rows` is None if they are unknown."""
    after = lengths_after(part, lengths)
    if lengths is not None and after is lengths and rows not in (None, out.shape[1]):
        raise ValueError(
            f"{type(part).__name__} made {out.shape[1]} rows of {rows}, so lengths need a method "
            "lengths(lengths) on it, which returns those that it leaves"
        )
    if after is not lengths:
        check_lengths(after, out, f"the output of {type(part).__name__}")
    return after


def places(lengths: Lengths, rows: Tensor, name: str = "tokens") -> Positions:
    """The positions of tokens, which start at 0 in each row or packed sequence."""
    check_lengths(lengths, rows, name)
    return lengths.to(rows.device).positions() if isinstance(lengths, PackedLengths) else 0


def check_lengths(lengths: Lengths, rows: Tensor, name: str = "tokens") -> None:
    """Raises if `rows` is not a tensor, or the lengths do not fit it; errors call it `name`."""
    if not isinstance(rows, Tensor):
        raise ValueError(f"{name} must be a tensor, got {shown(rows)}; use torch.tensor([ids])")
    if lengths is not None and rows.ndim in (2, 3):  # an image's rows are its patches
        _check(lengths, name, *rows.shape[:2])


def check_pairs(
    name: str, source: Tensor, source_lengths: Lengths, target: Tensor, target_lengths: Lengths
) -> None:
    """Raises unless source and target are tensors of as many sentences; one serves all."""
    for batch, of in ((source, name), (target, "target")):
        if not isinstance(batch, Tensor):
            raise ValueError(f"{of} must be a tensor, got {shown(batch)}; use torch.tensor([ids])")
        if batch.ndim < 2:
            raise ValueError(f"{of} of shape {tuple(batch.shape)} must be a batch; use {of}[None]")
    if isinstance(source_lengths, PackedLengths) or isinstance(target_lengths, PackedLengths):
        return  # `memory_and_mask` compares them
    sources, targets = source.shape[0], target.shape[0]
    if not (broadcasts(sources, targets) or broadcasts(targets, sources)):
        kind = "images" if source.ndim == 4 else "sentences"
        raise ValueError(
            f"{name} has {sources} {kind} and target has {targets}; pass one source for each target"
        )


def _check(lengths: PackedLengths | Tensor | Sequence[int], name: str, B: int, L: int) -> None:
    if isinstance(lengths, PackedLengths):
        if B != 1 or lengths.total != L:
            raise ValueError(
                f"{lengths} adds up to {lengths.total} tokens, but {name} has {B} rows of {L}; "
                f"lay the sequences end to end in one row of {lengths.total}"
            )
        return
    counts = integer_tensor(lengths, "lengths")
    if len(counts) != B:
        raise ValueError(
            f"{len(counts)} lengths, but {name} is a batch of {B}; pass one for each sentence"
        )
    if on_host(counts) and B and int(counts.max()) > L:
        raise ValueError(
            f"a length ({int(counts.max())}) is longer than the rows of {name} ({L}); pass the "
            "number of real tokens of each sentence"
        )
