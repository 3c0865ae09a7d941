"""The settings of a search, and the search that generates text with them.

    source → encoder → session → greedy or beam → hypotheses

A task's section of config.json keeps the settings; `translator` and `read` write by them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from regard.attention.checks import check_integer
from regard.attention.packed import PackedLengths
from regard.data.tokenizer import AnyTokenizer
from regard.decode.engine.pick import open_session
from regard.decode.engine.session import Session
from regard.decode.search.beam import beam, power
from regard.decode.search.greedy import greedy
from regard.decode.search.hypothesis import Hypothesis
from regard.model.fits import check_cache
from regard.model.formula import Config
from regard.model.transformer import Transformer
from regard.task.settings import section


def check_penalty(length_penalty: float) -> None:
    if not abs(length_penalty) <= 10:
        raise ValueError(f"length_penalty ({length_penalty}) must be from -10 to 10; try 1")


@dataclass(frozen=True)
class SearchSettings:
    """The settings of a search, as a model's folder keeps them."""

    start: int
    """The token that every target begins with."""
    end: int
    """The token that closes sources and targets."""
    pad: int
    """The padding token."""
    banned: tuple[int, ...] = ()
    """Tokens that are never generated."""
    beams: int = 4
    """Beam size; 1 is greedy search."""
    length: int = 250
    """Maximum length in tokens of a target, and of a source that is not cut into parts."""
    length_penalty: float = 1.0
    """Length penalty: log p is divided by the number of tokens to this power."""
    renormalize: bool = False
    """Renormalize probabilities over the tokens that are not banned."""
    horizon: int | None = 2
    """Horizon in tokens: the search of a sentence ends if no open hypothesis could win within them;
    None: to the maximum length. On Multi30k nothing else is found, in 0.4 of the steps."""

    def __post_init__(self) -> None:
        for name in ("beams", "length"):
            check_integer(name, getattr(self, name))
        if self.horizon is not None and self.horizon < 0:
            raise ValueError(f"horizon ({self.horizon}) must be 0 or more, or null")
        check_penalty(self.length_penalty)

    @classmethod
    def of(cls, tokenizer: AnyTokenizer, **settings: Any) -> "SearchSettings":
        """For a tokenizer's special tokens, of which only the end is ever generated."""
        never = {tokenizer.pad, tokenizer.start, tokenizer.unknown} - {tokenizer.end, None}
        return cls(
            start=tokenizer.start,
            end=tokenizer.end,
            pad=tokenizer.pad,
            banned=tuple(sorted(token for token in never if token is not None)),
            **settings,
        )

    @classmethod
    def read(cls, about: Mapping[str, Any], where: str) -> "SearchSettings":
        """The settings in a task's section of config.json, which may have other entries."""
        return section(cls, about, where)


def search(
    model: Transformer,
    source: Tensor,
    lengths: PackedLengths | None,
    settings: SearchSettings,
    *,
    most: int | Sequence[int] | None = None,
    n_best: int = 1,
) -> list[list[Hypothesis]]:
    """The best hypotheses for each source, which is packed ids or a batch of images."""
    sentences = len(source) if lengths is None else len(lengths)
    opened = partial(open_reading, model, source, lengths)
    return find(opened, sentences, settings, most=most, n_best=n_best)


def open_reading(
    model: Transformer,
    source: Tensor,
    lengths: PackedLengths | None,
    *,
    beams: int = 1,
    length: int = 64,
) -> Session:
    """A session of sources that may be anywhere."""
    check_beams(beams, model.config.vocabulary)
    device = model.target.table.weight.device
    counts = None if lengths is None else lengths.to(device)
    return open_session(model, source.to(device), counts, beams=beams, length=length)


def check_search(config: Config, beams: int, device: torch.device | str, number: int = 4) -> None:
    """Raises if the beam's KV cache cannot fit even for a short sentence."""
    check_beams(beams, getattr(config, "vocabulary", beams))
    check_cache(config, 1, beams, SHORTEST, device, number)


SHORTEST = 32
"""Tokens that every search has room for."""


def check_beams(beams: int, vocabulary: int) -> None:
    """A search cannot keep more hypotheses than a step has tokens to begin them with."""
    if beams > vocabulary:
        raise ValueError(
            f"beams ({beams}) must be at most {vocabulary}, the size of the vocabulary; more than "
            "a few change little"
        )


def find(
    opened: Callable[..., Session],
    sentences: int,
    settings: SearchSettings,
    *,
    most: int | Sequence[int] | None = None,
    n_best: int = 1,
    prefixes: Sequence[Sequence[int]] | None = None,
) -> list[list[Hypothesis]]:
    """The best hypotheses for each sentence of a session, which `opened(beams=, length=)` gives.

    `most` bounds the tokens of all of them, or of each, below the search's own bound. Where there
    are prefixes, each sentence continues its own, which is not part of its hypotheses.

    A sentence takes memory for its caches, for each layer of the decoder, in numbers:

        beams · (most + 1) · (K + V) · key heads        its own keys and values, at the most
        source · (K + V) · key heads                    those of the source, shared by its beams

    K + V is 128 in the paper's models, and there are 8 key heads in the base one, with 6 layers: a
    sentence of 20 tokens that may come to 90 takes 9.4 MB in float32 with 4 beams, and half of that
    in bfloat16. They are gone when the batch is: a corpus takes no more than its largest batch.
    """
    prefixes = [()] * sentences if prefixes is None else prefixes
    bounds = [most] * sentences if isinstance(most, int | None) else list(most)
    limits = [settings.length if bound is None else min(bound, settings.length) for bound in bounds]
    limits = [max(1, limit - len(prefix)) for limit, prefix in zip(limits, prefixes)]
    width = max(settings.beams, n_best)
    rules: dict[str, Any] = {
        "end": settings.end,
        "max_length": limits,
        "banned": settings.banned,
        "renormalize": settings.renormalize,
    }
    prompts = [[settings.start, *prefix] for prefix in prefixes]
    length = max((limit + len(prefix) for limit, prefix in zip(limits, prefixes)), default=0)
    with opened(beams=width, length=length + 1) as session:
        if width == 1:
            return [[hypothesis] for hypothesis in greedy(session, prompts, **rules)]
        rules |= {"penalty": power(settings.length_penalty), "horizon": settings.horizon}
        return beam(session, prompts, width=width, n_best=n_best, **rules)


MAX_TOKENS = 1024
"""Tokens of a text that a model reads at once, for its score or for attention weights, unless the
model was trained on longer ones: time and memory grow with their square."""


def check_length(what: str, tokens: int, trained: int = 0) -> None:
    """Raises if a text is too long to be scored, or for its attention weights.

    `trained` is the length of the texts that the model was trained on.
    """
    most = max(MAX_TOKENS, trained)
    if tokens > most:
        raise ValueError(
            f"the {what} has {tokens:,} tokens, and a score or attention weights are computed for "
            f"at most {most:,}; split it at sentences"
        )


@runtime_checkable
class Writer(Protocol):
    """Whatever writes text by a search."""

    search: SearchSettings
    _folder: str

    @property
    def tokenizer(self) -> AnyTokenizer: ...


def check_same_tokens(writers: Sequence[Writer]) -> None:
    """Members of an ensemble: token n must be the same text for all."""
    first, *others = writers
    for other in others:
        differ = f"{first._folder} and {other._folder} cannot be an ensemble: their"
        if first.tokenizer.to_bytes() != other.tokenizer.to_bytes():
            raise ValueError(
                f"{differ} target tokenizers differ, {first.tokenizer} and {other.tokenizer}; "
                "train both with the same --tokenizer"
            )
        for name in ("start", "end"):
            one, two = getattr(first.search, name), getattr(other.search, name)
            if one != two:
                raise ValueError(f"{differ} {name} tokens differ, {one} and {two}")
