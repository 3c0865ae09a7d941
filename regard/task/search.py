"""How a trained model writes: the settings of a search, and the search itself.

    source → encoder → session → greedy or beam → hypotheses

A task's section of config.json keeps the settings; `translator` and `read` write by them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from regard.attention.packed import Packed
from regard.config import from_json
from regard.data.tokenizer import AnyTokenizer
from regard.decode.engine.pick import open_session
from regard.decode.search.beam import beam, power
from regard.decode.search.greedy import greedy
from regard.decode.search.hypothesis import Hypothesis
from regard.model.transformer import Transformer


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

    def __post_init__(self) -> None:
        for name in ("beams", "length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} ({getattr(self, name)}) must be 1 or more")

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
        """What a folder's task says; it may say other things as well."""
        known = {field.name for field in fields(cls)}
        settings = {name: value for name, value in about.items() if name in known}
        return from_json(cls, settings, where, "task")


def search(
    model: Transformer,
    source: Tensor,
    lengths: Packed | None,
    settings: SearchSettings,
    *,
    most: int | Sequence[int] | None = None,
    n_best: int = 1,
) -> list[list[Hypothesis]]:
    """The best hypotheses for each source, which is packed ids or a batch of images.

    `most` bounds the tokens of all of them, or of each, below the search's own bound.

    Caches are what a sentence costs in memory, for each layer of the decoder, in numbers:

        beams · (most + 1) · (K + V) · key heads        its own keys and values, at the most
        source · (K + V) · key heads                    those of the source, shared by its beams

    K + V is 128 in the paper's models, and there are 8 key heads in the base one, with 6 layers: a
    sentence of 20 tokens that may come to 90 takes 9.4 MB in float32 with 4 beams, and half of that
    in bfloat16. They are gone when the batch is: a corpus takes no more than its largest batch.
    """
    device = model.target.table.weight.device
    sentences = len(source) if lengths is None else len(lengths)
    bounds = [most] * sentences if isinstance(most, int | None) else list(most)
    limits = [settings.length if bound is None else min(bound, settings.length) for bound in bounds]
    width = max(settings.beams, n_best)
    rules: dict[str, Any] = {
        "end": settings.end,
        "max_length": limits,
        "banned": settings.banned,
        "renormalize": settings.renormalize,
    }
    prompts = [[settings.start]] * sentences
    with open_session(
        model,
        source.to(device),
        None if lengths is None else lengths.to(device),
        beams=width,
        length=max(limits, default=0) + 1,
    ) as session:
        if width == 1:
            return [[hypothesis] for hypothesis in greedy(session, prompts, **rules)]
        penalty = power(settings.length_penalty)
        return beam(session, prompts, width=width, n_best=n_best, penalty=penalty, **rules)
