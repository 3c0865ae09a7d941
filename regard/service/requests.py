"""Requests to a model, its answers, and its refusals.

Requests and answers are plain data, so that they travel between processes as JSON.
"""

import math
from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a request, and of the queue."""

    characters: int = 20_000
    """Characters of all texts of a request."""
    texts: int = 1_000
    """Texts or images of a request."""
    pixels: int = 25_000_000
    """Pixels of an image."""
    image_bytes: int = 20_000_000
    """Bytes of an image's file."""
    beams: int = 16
    """Beam size."""
    tokens: int = 1_000
    """Tokens to be generated."""
    weights: int = 2**20
    """Attention weights of an answer, which has some 20 bytes for each."""
    seconds: float = 30.0
    """Time in which a request is answered, or given up."""
    queue: int = 4_000
    """Sentences and images that may wait; beyond, requests are refused for a while."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "seconds" and value < 1:
                raise ValueError(f"{name} ({value}) must be 1 or more")
        if not 0 < self.seconds < math.inf:
            raise ValueError(f"seconds ({self.seconds}) must be above 0; try 30")


LIMITS = Limits()


# Refusals


class Refused(ValueError):  # noqa: N818
    """A refused request; the message is the reason, without any text of the request."""


class TooLarge(Refused):
    """The request is beyond the limits."""


class Unknown(Refused):
    """No such model, or none that could answer such a request."""


class Busy(Refused):
    """Too many are waiting."""

    def __init__(self, message: str, retry_after: int = 1):
        super().__init__(message)
        self.retry_after = retry_after


class Late(Refused):
    """It was not answered in time."""


class Lost(Refused):
    """Whoever was answering it is gone; it can be asked again."""


# Requests


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request of any kind."""

    model: str | None = None
    """Its name; None where only one can be meant."""
    seconds: float | None = None
    """Time in which it wants to be answered, within the limits."""


@dataclass(frozen=True, kw_only=True)
class Translate(Request):
    texts: tuple[str, ...]
    beams: int | None = None
    """Beam size; by default the model's own."""
    n_best: int = 1
    markup: bool = False
    """The texts are HTML, of which tags are kept."""


@dataclass(frozen=True, kw_only=True)
class Generate(Request):
    prompts: tuple[str, ...]
    length: int = 200
    """New tokens, at most."""
    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= 100:
            raise Refused(f"temperature ({self.temperature}) must be from 0 to 100")
        if self.top_k is not None and self.top_k < 1:
            raise Refused(f"top_k ({self.top_k}) must be 1 or more")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise Refused(f"top_p ({self.top_p}) must be above 0 and at most 1")
        if not 0 <= self.seed < 2**63:
            raise Refused(f"seed ({self.seed}) must be 0 or more, and fit into 63 bits")


@dataclass(frozen=True, kw_only=True)
class Read(Request):
    images: tuple[bytes, ...]
    """The content of image files."""
    beams: int | None = None


@dataclass(frozen=True, kw_only=True)
class Classify(Request):
    images: tuple[bytes, ...]
    top: int = 1
    """Labels of each, the likeliest first."""


@dataclass(frozen=True, kw_only=True)
class Label(Request):
    texts: tuple[str, ...]
    top: int = 1


@dataclass(frozen=True, kw_only=True)
class Attend(Request):
    """The cross-attention of a model while it generates from a text or an image."""

    text: str | None = None
    image: bytes | None = None
    written: str | None = None
    """A forced output; by default the model generates one."""


# Answers


@dataclass(frozen=True)
class Candidate:
    """One of the best."""

    text: str
    score: float


@dataclass(frozen=True)
class Translation:
    text: str
    score: float
    """Of the best hypothesis: log p by its length to the power of the length penalty. Of a text in
    several pieces, the mean."""
    alternatives: tuple[Candidate, ...] = ()
    """The next best, if `n_best` is more than 1."""


@dataclass(frozen=True)
class Scored:
    """A label, and how probable it is."""

    label: str
    probability: float


@dataclass(frozen=True)
class Attention:
    """Cross-attention while a text was written."""

    text: str
    source: tuple[str, ...]
    """Tokens; of an image nothing."""
    target: tuple[str, ...]
    weights: tuple[Any, ...]
    """Numbers by layer, head, target token and source token; of an image by row and column."""
    alignment: tuple[tuple[int, int], ...] = ()
    """Words of the source and of the text, counted from 0."""


Answer: TypeAlias = (
    tuple[Translation, ...] | tuple[str, ...] | tuple[tuple[Scored, ...], ...] | Attention
)


@dataclass(frozen=True)
class Delta:
    """The next piece of an answer that is streamed, for text or prompt number `index`."""

    index: int
    text: str


@dataclass(frozen=True)
class About:
    """A model that is served."""

    name: str
    task: str
    """translate, read, generate, classify or label."""
    engine: str
    parameters: int
    loaded: bool
    version: int
    """How often it has been loaded."""
    labels: tuple[str, ...] = ()
