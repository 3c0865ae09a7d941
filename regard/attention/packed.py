"""Sequences without padding: laid end to end, and known by their lengths."""

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.attention.checks import MAX_LENGTH, integer_tensor, shown


class PackedLengths:
    """The lengths of sequences laid end to end in one row of a (1, T) batch, without padding.

    `offsets` (int32, on the device) holds where each sequence begins, and the total last;
    `longest` and `total` are plain ints, because kernels need them without asking the device.
    """

    def __init__(self, lengths: Sequence[int] | Tensor, device: torch.device | str | None = None):
        tensor = integer_tensor(lengths, "packed lengths")
        self.lengths = tensor.to("cpu", torch.int64, copy=True)
        if self.lengths.numel() and int(self.lengths.min()) < 0:
            raise ValueError(
                f"packed lengths must not be negative, got {shown(self.lengths)}; they count tokens"
            )
        self.longest = int(self.lengths.max()) if self.lengths.numel() else 0
        self.total = int(self.lengths.sum())
        if max(self.longest, self.total) > MAX_LENGTH:
            raise ValueError(
                f"packed lengths {shown(self.lengths)} are more than {MAX_LENGTH} tokens; pass "
                "fewer sequences"
            )
        self.offsets = self._offsets(tensor.device if device is None else device)

    @staticmethod
    def even(sequences: int, length: int, device: torch.device | str) -> "PackedLengths":
        """Sequences of one length, such as images' patches, for which no device need be asked."""
        packed = object.__new__(PackedLengths)
        packed.lengths = torch.full((sequences,), length, device="cpu")
        packed.longest, packed.total = length, sequences * length
        packed.offsets = torch.arange(sequences + 1, dtype=torch.int32, device=device) * length
        return packed

    def filled(self, tokens: int, sequences: int, longest: int) -> "PackedLengths":
        """The same sequences in a batch of a fixed size, whose shapes never change.

        The rest of the tokens belong to further sequences of `longest` tokens at most, so that
        every token has keys to attend to; their results are not read.
        """
        rest, free = tokens - self.total, sequences - len(self)
        pieces = [longest] * (rest // max(1, longest)) + [rest % max(1, longest)]
        if rest < 0 or len(pieces) > free or self.longest > longest:
            raise ValueError(
                f"{self} does not fit {sequences} sequences of {longest} tokens at most, {tokens} "
                "in all; raise the capacity"
            )
        filling = torch.tensor(pieces + [0] * (free - len(pieces)))
        filled = PackedLengths(torch.cat([self.lengths, filling]), "cpu")
        filled.longest = longest
        return filled

    def pin(self) -> "PackedLengths":
        """The same with its offsets in pinned memory, from which copies do not wait."""
        return self._with(self.offsets.pin_memory())

    def copy(self) -> "PackedLengths":
        return self._with(self.offsets.clone())

    def _with(self, offsets: Tensor) -> "PackedLengths":
        same = object.__new__(PackedLengths)
        same.lengths, same.longest, same.total = self.lengths, self.longest, self.total
        same.offsets = offsets
        return same

    def _offsets(self, device: torch.device | str) -> Tensor:
        offsets = torch.zeros(len(self.lengths) + 1, dtype=torch.int32, device="cpu")
        offsets[1:] = self.lengths.cumsum(0)
        return offsets.to(device, non_blocking=True)

    def to(self, device: torch.device | str) -> "PackedLengths":
        """The same lengths with their offsets on another device, without synchronising."""
        if self.offsets.device == torch.device(device):
            return self
        pinned = self.offsets.is_pinned()
        moved = self.offsets.to(device, non_blocking=True) if pinned else self._offsets(device)
        return self._with(moved)

    def sequence(self) -> Tensor:
        """The index of the sequence to which each of the T tokens belongs, shape (T,)."""
        tokens = torch.arange(self.total, device=self.offsets.device, dtype=torch.int32)
        return torch.bucketize(tokens, self.offsets[1:], right=True)

    def positions(self) -> Tensor:
        """Position of each token in its own sequence, shape (1, T): 0, 1, 2, 0, 1, ..."""
        tokens = torch.arange(self.total, device=self.offsets.device)
        return (tokens - self.offsets[self.sequence()])[None]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __repr__(self) -> str:
        return f"PackedLengths({shown(self.lengths)})"
