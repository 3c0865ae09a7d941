"""Strips of handwritten digits: images to be read as text, composed from single digits.

Strip n is a function of (seed, n): how many digits there are and which, the gaps before and
between them, how high or low each stands, how dark its ink is, and the noise over all. There is
no end of them, so a training never sees one twice. The digits that are held out for validation
appear in no strip that is trained on.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Integer, UInt8, UInt64

from regard.data.image import Images

DIGIT = 8  # pixels along a digit's side


@dataclass(frozen=True)
class Strip:
    """What strips of digits look like."""

    least: int = 1
    """Digits of the shortest."""
    most: int = 4
    """Digits of the longest."""
    rows: int = 12
    """Pixels from top to bottom; a digit has 8."""
    columns: int = 44
    """Pixels from left to right."""
    margin: int = 6
    """Pixels before the first digit, at most."""
    gap: int = 2
    """Pixels between two digits, at most; every digit has some empty ones of its own."""
    rise: int = 2
    """Pixels between the highest place of a digit and the lowest."""
    ink: float = 0.6
    """How dark the palest digit is; the darkest is 1."""
    noise: float = 0.06
    """Deviation of the noise that every pixel has, from 0 to 1."""
    easy: int = 12_800
    """The first so many strips of a training are of the shortest kind: a curriculum, from which a
    model learns to tell digits before it has to find them."""
    grow: int = 6_400
    """Strips after which there may be one more digit, from then on."""

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ValueError(
                f"least ({self.least}) must be 1 or more, and at most as many as most ({self.most})"
            )
        for name in ("margin", "gap", "rise", "easy", "grow"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} ({getattr(self, name)}) must be 0 or more")
        high = DIGIT + self.rise
        wide = self.margin + DIGIT * self.most + self.gap * (self.most - 1)
        if self.rows < high or self.columns < wide:
            raise ValueError(
                f"a strip of {self.rows} × {self.columns} is too small for {self.most} digits, "
                f"margin ({self.margin}), gaps ({self.gap}) and rise ({self.rise}); it must have "
                f"{high} × {wide} at least"
            )
        if not 0 < self.ink <= 1 or not 0 <= self.noise <= 1:
            raise ValueError(
                f"ink ({self.ink}) must be above 0, noise ({self.noise}) 0 or more, both at most 1"
            )


class Strips:
    """Endless strips of some digits: white on black, as the digits are."""

    def __init__(self, digits: Images, how: Strip, seed: int):
        if digits.labels is None or digits.shape != (1, DIGIT, DIGIT):
            raise ValueError(
                f"digits of shape {digits.shape} must have labels and be {(1, DIGIT, DIGIT)}"
            )
        self.pixels = digits.batch(np.arange(len(digits))).numpy()[:, 0]
        self.labels = digits.labels
        self.how, self.seed = how, seed

    def texts(self, numbers: Integer[np.ndarray, "B"]) -> list[str]:
        """What these strips say."""
        counts, chosen = self._said(numbers)
        rows = self.labels[chosen].tolist()
        return ["".join(map(str, row[:count])) for row, count in zip(rows, counts.tolist())]

    def images(self, numbers: Integer[np.ndarray, "B"]) -> UInt8[np.ndarray, "B 1 Y X"]:
        """What these strips look like."""
        how, B, most = self.how, len(numbers), self.how.most
        counts, chosen = self._said(numbers)
        there = np.arange(most) < counts[:, None]
        most_empty = np.array([how.margin, *[how.gap] * (most - 1)])
        empty = np.floor(self._chance(numbers, 1, most) * (most_empty + 1)).astype(np.int64)
        left = np.cumsum(empty, 1) + DIGIT * np.arange(most)
        top = np.floor(self._chance(numbers, 2, most) * (how.rise + 1)).astype(np.int64)
        top += (how.rows - DIGIT - how.rise) // 2
        ink = how.ink + (1 - how.ink) * self._chance(numbers, 3, most)

        strips = np.zeros((B, how.rows, how.columns))
        side = np.arange(DIGIT)
        for place in range(int(counts.max(initial=0))):
            here = np.flatnonzero(there[:, place])
            y = top[here, place, None, None] + side[:, None]
            x = left[here, place, None, None] + side
            drawn = self.pixels[chosen[here, place]] * ink[here, place, None, None]
            strips[here[:, None, None], y, x] = drawn
        if how.noise:
            bits = self._bits(numbers, 4, how.rows * how.columns)
            # Four uniform numbers of 16 bits each: their sum is nearly normal.
            total = bits.view(np.uint16).reshape(B, how.rows, how.columns, 4).sum(-1, np.float32)
            strips += 255 * how.noise * (total / 2**16 - 2) * 3**0.5
        return np.clip(np.round(strips), 0, 255).astype(np.uint8)[:, None]

    def _said(
        self, numbers: Integer[np.ndarray, "B"]
    ) -> tuple[Integer[np.ndarray, "B"], Integer[np.ndarray, "B most"]]:
        """How many digits each strip has, and which; a few more are drawn than there are."""
        how = self.how
        drawn = self._chance(numbers, 0, 1 + how.most)
        longer = np.maximum(numbers - how.easy, -1) // max(1, how.grow) + 1
        most = np.minimum(how.least + longer, how.most) if how.easy else how.most
        counts = how.least + np.floor(drawn[:, 0] * (most - how.least + 1)).astype(np.int64)
        return counts, np.floor(drawn[:, 1:] * len(self.labels)).astype(np.int64)

    def _chance(
        self, numbers: Integer[np.ndarray, "B"], purpose: int, count: int
    ) -> Float64[np.ndarray, "B count"]:
        """Numbers from 0 to below 1."""
        return (self._bits(numbers, purpose, count) >> np.uint64(11)) * 2.0**-53

    def _bits(
        self, numbers: Integer[np.ndarray, "B"], purpose: int, count: int
    ) -> UInt64[np.ndarray, "B count"]:
        """Chance, decided by the seed, the strip and what it is for."""
        key = _mixed(np.array([self.seed], np.uint64)) + np.uint64(purpose)
        strip = _mixed(key ^ _mixed(numbers.astype(np.uint64)))
        return _mixed(strip[:, None] + np.arange(count, dtype=np.uint64))


def _mixed(numbers: UInt64[np.ndarray, "*n"]) -> UInt64[np.ndarray, "*n"]:
    """The finalizer of SplitMix64 (Steele et al. 2014): near numbers become unlike ones."""
    x = numbers + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
