"""What a search gives back."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A sequence found, and how well the model thinks of it."""

    tokens: list[int]
    """What was found after the prompt, without the sign that ends it."""
    score: float
    """By which hypotheses are ranked: the token scores' sum, less whatever a search adds to it."""
    token_scores: list[float]
    """log p of each token, and last that of the end sign where it was reached."""

    def __post_init__(self) -> None:
        if self.score != self.score:
            raise ValueError(
                f"the score of {len(self.tokens)} tokens is {self.score}: the logits were not "
                "finite; look for NaN in the weights and in the source, or use a wider dtype"
            )

    @property
    def ended(self) -> bool:
        """Whether it came to an end by itself; otherwise it was cut at the greatest length."""
        return len(self.token_scores) > len(self.tokens)
