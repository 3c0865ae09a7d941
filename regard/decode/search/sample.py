"""Sampling: each token is drawn from the model's distribution.

    y_t ~ softmax(logits / τ), among the k likeliest, or the fewest that hold a share p

A temperature τ below 1 sharpens, above 1 flattens; top-k (Fan et al. 2018) and top-p, the nucleus
(Holtzman et al. 2020), leave the long tail out. Sentence n draws from (seed, n), one number for
each token: it finds the same whichever batch it is in.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.attention.checks import check_integer
from regard.decode.engine.session import Session
from regard.decode.search.constraints import Constraints, Length, check_memory
from regard.decode.search.greedy import Paths
from regard.decode.search.hypothesis import Hypothesis
from regard.decode.search.topk import Best, largest


@torch.inference_mode()
def sample(
    session: Session,
    prompts: Sequence[Sequence[int]],
    *,
    end: int,
    max_length: Length,
    min_length: Length = 0,
    banned: Sequence[int] = (),
    renormalize: bool = False,
    temperature: float | int = 1.0,
    top_k: int | None = None,
    top_p: float | int | None = None,
    seed: int = 0,
    indices: Sequence[int] | None = None,
) -> list[Hypothesis]:
    """One hypothesis for each prompt; `indices` number the sentences (by default from 0).

    Where both are given, top-p takes its share of what top-k left. Scores are log p of the model
    itself, before temperature and truncation.
    """
    if not 0 < temperature < math.inf:
        raise ValueError(
            f"temperature ({temperature}) must be above 0; for the likeliest tokens use greedy "
            "search"
        )
    if top_k == 0:
        raise ValueError("top_k (0) must be 1 or more; leave it out to sample from all tokens")
    if top_k is not None:
        check_integer("top_k", top_k)
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p ({top_p}) must be above 0 and at most 1; try 0.9")
    indices = range(len(prompts)) if indices is None else indices
    if len(indices) != len(prompts):
        raise ValueError(
            f"indices ({len(indices)}) must be as many as prompts ({len(prompts)}); "
            "give each sentence its number"
        )
    if not prompts:
        return []
    check_memory(session, len(prompts), max_length)
    constraints = Constraints(
        len(prompts),
        session.vocabulary,
        end=end,
        max_length=max_length,
        min_length=min_length,
        banned=banned,
        renormalize=renormalize,
        device=session.device,
    )
    dice = torch.from_numpy(uniforms(seed, indices, constraints.steps))
    paths = Sampled(session.begin(prompts), constraints, dice, temperature, top_k, top_p)
    session.run(paths)
    return paths.hypotheses()


class Sampled(Paths):
    """One path for each sentence, of sampled tokens."""

    def __init__(
        self,
        last: Int[Tensor, "B"],
        constraints: Constraints,
        dice: Float[Tensor, "B T"],
        temperature: float | int = 1.0,
        top_k: int | None = None,
        top_p: float | int | None = None,
    ):
        super().__init__(last, constraints)
        self.dice = dice.to(last.device)
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p

    def choose(self, logits: Float[Tensor, "R N"], best: Callable[..., Best]) -> Best:
        logs = log_probabilities(logits, self.constraints, self.t)
        dice = self.dice[self.sentences, self.t]
        tokens = draw(logs, dice, self.temperature, self.top_k, self.top_p)[:, None]
        return logs.gather(1, tokens), tokens


def log_probabilities(
    logits: Float[Tensor, "R N"], constraints: Constraints, t: int | Tensor
) -> Float[Tensor, "R N"]:
    """log p of all tokens at step t, at least in float32; -∞ for tokens not allowed."""
    logs = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if constraints.renormalize:
        constraints.hide(logs, t)
    logs = logs.log_softmax(-1)
    constraints.hide(logs, t)
    return logs


def uniforms(seed: int, indices: Sequence[int], length: int) -> np.ndarray:
    """(B, length) numbers from 0 to 1, row b from (seed, indices[b]) alone."""
    for name, number in (("seed", seed), *(("index", index) for index in indices)):
        check_integer(name, number, least=0)
        if number >= 2**64:
            raise ValueError(f"{name} ({number}) must be below 2**64")
    rows = [
        np.random.Generator(np.random.Philox(key=np.array([seed, index], np.uint64))).random(length)
        for index in indices
    ]
    return np.stack(rows) if rows else np.zeros((0, length))


def draw(
    logs: Float[Tensor, "R N"],
    dice: Float[Tensor, "R"],
    temperature: float | int = 1.0,
    top_k: int | None = None,
    top_p: float | int | None = None,
) -> Int[Tensor, "R"]:
    """Inverse transform sampling: the token at each random number, likeliest tokens first."""
    N = logs.shape[-1]
    if top_k is not None and top_k < N:
        logs, tokens = largest(logs, top_k)
    else:
        logs, tokens = logs.sort(dim=-1, descending=True, stable=True)
    # In float64 neither the sum of a large vocabulary nor a die near 1 is rounded away.
    share = (logs.double() / temperature).softmax(-1)
    upto = share.cumsum(-1)
    kept = share > 0
    if top_p is not None:
        kept &= upto - share < top_p
    last = (kept.sum(-1, keepdim=True) - 1).clamp(min=0)  # of NaN nothing is kept
    mark = dice.double()[:, None] * upto.gather(1, last)
    place = torch.searchsorted(upto, mark, right=True).minimum(last)
    return tokens.gather(1, place)[:, 0]
