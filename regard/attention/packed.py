"""The lengths of sequences that are laid end to end, without padding."""

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.attention.checks import MAX_LENGTH, integer_tensor, shown
from regard.synonyms import suggest_names


@suggest_names
class PackedLengths:
    """The lengths of sequences laid end to end in one row of a (1, T) batch, without padding.

    Models take it where a padded batch passes a tensor of lengths. `lengths` (B,) stays on the
    host. `offsets` (int32, on the device) holds where each sequence begins, and the total last.
    `longest` and `total` are ints, because kernels need them without waiting for the device. Every
    method returns a new object; none changes this one.

    >>> import torch
    >>> from regard import LanguageModel, PackedLengths
    >>> lengths = PackedLengths([3, 2])
    >>> lengths.positions(), lengths.sequence()
    (tensor([[0, 1, 2, 0, 1]]), tensor([0, 0, 0, 1, 1]))
    >>> lengths.total, lengths.longest, lengths.offsets
    (5, 3, tensor([0, 3, 5], dtype=torch.int32))
    >>> LanguageModel.tiny(100)(torch.tensor([[7, 8, 9, 4, 5]]), lengths=lengths).shape
    torch.Size([1, 5, 100])
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
        """Returns the lengths of sequences of one size, such as an image's patches.

        The offsets are computed on the device, without a copy from the host.

        >>> from regard import PackedLengths
        >>> PackedLengths.even(3, 196, "cpu").offsets
        tensor([  0, 196, 392, 588], dtype=torch.int32)
        """
        packed = object.__new__(PackedLengths)
        packed.lengths = torch.full((sequences,), length, device="cpu")
        packed.longest, packed.total = length, sequences * length
        packed.offsets = torch.arange(sequences + 1, dtype=torch.int32, device=device) * length
        return packed

    def filled(self, tokens: int, sequences: int, longest: int) -> "PackedLengths":
        """Returns a copy with further sequences, up to a fixed number of tokens and sequences.

        The rest of the tokens belong to further sequences of `longest` tokens at most, so that
        every token has keys to attend to; their results are not read. The shapes of such batches
        never change, as a CUDA graph requires.

        >>> from regard import PackedLengths
        >>> PackedLengths([3, 2]).filled(tokens=12, sequences=5, longest=4).lengths
        tensor([3, 2, 4, 3, 0])
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
        """Returns a copy with its offsets in pinned memory, for asynchronous transfers."""
        return self._with(self.offsets.pin_memory())

    def copy(self) -> "PackedLengths":
        """Returns a copy with its own offsets."""
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
        """Returns a copy with its offsets on the device, without synchronising.

        It returns itself if they are there already, as `Tensor.to` does.
        """
        if self.offsets.device == torch.device(device):
            return self
        pinned = self.offsets.is_pinned()
        moved = self.offsets.to(device, non_blocking=True) if pinned else self._offsets(device)
        return self._with(moved)

    def sequence(self) -> Tensor:
        """Returns the index of the sequence to which each token belongs, (T,)."""
        tokens = torch.arange(self.total, device=self.offsets.device, dtype=torch.int32)
        return torch.bucketize(tokens, self.offsets[1:], right=True)

    def positions(self) -> Tensor:
        """Returns the position of each token in its own sequence, (1, T)."""
        tokens = torch.arange(self.total, device=self.offsets.device)
        return (tokens - self.offsets[self.sequence()])[None]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __repr__(self) -> str:
        return f"PackedLengths({shown(self.lengths)})"
