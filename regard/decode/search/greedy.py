"""Greedy search: the likeliest token, again and again.

    y_t = argmax_y p(y | y_<t, x)

The best first token need not begin the best sentence; `beam` keeps several open, `sample` throws
dice. All of them know a model only as a step (see `step`).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.decode.engine.eager import State, Step, Whole
from regard.decode.search.constraints import Length, Limits, log_probabilities, staying
from regard.decode.search.hypothesis import Hypothesis

Choose = Callable[[Float[Tensor, "R N"], Int[Tensor, "R"], Int[Tensor, "R"]], Int[Tensor, "R"]]
"""From log p (-∞ where not allowed), which sentence each row is, and how far it is: tokens."""


def greedy(
    step: Step,
    state: State,
    prompts: Sequence[Sequence[int]],
    *,
    end: int,
    max_length: Length,
    min_length: Length = 0,
    banned: Sequence[int] = (),
) -> list[Hypothesis]:
    """One hypothesis for each prompt, which is the start sign and any tokens after it.

    Lengths count what is found after the prompt, without the end sign. `score` is log p.
    """
    limits = Limits(prompts, end, max_length, min_length, banned)
    if isinstance(state, Whole) and limits.plain and len(prompts):
        found = state.greedy(limits)
        if found is not None:
            return found
    return follow(step, state, limits)


@torch.inference_mode()
def follow(
    step: Step, state: Any, limits: Limits, choose: Choose | None = None
) -> list[Hypothesis]:
    """One path for each sentence, whose tokens `choose` picks, by default the likeliest.

    Finished sentences leave.
    """
    B, T = len(limits.prompt), limits.steps
    if B == 0:
        return []
    logits, state = step(limits.prompt, state)
    limits.fit(logits)
    given, most = (-limits.found(0)).tolist(), limits.most.tolist()
    device = logits.device
    rows = torch.arange(B, device=device)  # the sentence that each row is
    over = torch.zeros(B, dtype=torch.bool, device=device)
    tokens = torch.full((B, T), limits.end, device=device)
    scores = torch.zeros(
        B, T, dtype=torch.promote_types(logits.dtype, torch.float32), device=device
    )
    for t in range(T):
        if choose is None:
            log, new = (x[:, 0, 0] for x in limits.best(logits[:, None], t, 1))
        else:
            logs = limits.apply(log_probabilities(logits)[:, None], t)[:, 0]
            new = choose(logs, rows, limits.found(t))
            log = logs.gather(1, new[:, None])[:, 0]
        tokens[rows, t], scores[rows, t] = new, log
        # A row that is done may stay a while and write on: nobody reads what follows its end.
        over = over | limits.ended(new[:, None], t)[:, 0] | limits.full(t)
        done = over.tolist()  # all that a step waits for
        if all(done):
            break
        kept = staying(done)
        if kept is not None:
            state.select(kept)
            limits.select(kept)
            here = kept.to(device)
            rows, new, over = rows[here], new[here], over[here]
        logits, state = step(new[:, None], state)
    found = zip(tokens.tolist(), scores.tolist(), given, most)
    return [read(*one, limits.end) for one in found]


def read(tokens: list[int], scores: list[float], given: int, most: int, end: int) -> Hypothesis:
    """What one sentence found after its prompt, up to its end."""
    tokens, scores = tokens[given : given + most], scores[given : given + most]
    if end in tokens:
        length = tokens.index(end)
        tokens, scores = tokens[:length], scores[: length + 1]
    return Hypothesis(tokens, math.fsum(scores), scores)
