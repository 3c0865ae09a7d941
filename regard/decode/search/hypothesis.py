"""The result of a search."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A sequence of tokens and its score."""

    tokens: list[int]
    """The tokens after the prompt, without EOS."""
    score: float
    """What hypotheses are ranked by: the sum of token scores, with a search's own penalties."""
    token_scores: list[float]
    """log p of each token, and last that of EOS where it was reached."""

    def __post_init__(self) -> None:
        check_finite(self.score)

    @property
    def ended(self) -> bool:
        """Whether it ended by itself; otherwise it was cut at the maximum length."""
        return len(self.token_scores) > len(self.tokens)


def check_finite(values: float | Tensor) -> None:
    """Raises if a score or a probability is NaN, as it is where the logits were not finite."""
    if bool(values.isnan().any()) if isinstance(values, Tensor) else values != values:
        raise ValueError(
            "the logits were not finite; look for NaN in the weights and in the source, or use a "
            "wider dtype"
        )
