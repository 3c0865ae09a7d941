"""Learning-rate schedules: functions from the step, counted from 1, to a factor of `lr`.

    noam          D^-½ · min(n^-½, n · w^-3/2)        Vaswani et al. (2017), equation 3
    inverse_sqrt  min(n / w, √(w / n))                the same curve with its peak at 1
    cosine        n / w, then (1 + cos π t) / 2       Loshchilov and Hutter (2017), one period
    linear        n / w, then 1 - t
    constant      n / w, then 1

w is the warm-up, D the model's width, and t goes from 0 at its end to 1 at the last step. Where
time is limited too, t is the share of it that is over, if that is more.
"""

import math

from regard.train.config import Schedule


def noam(step: int, *, width: int, warmup: int) -> float:
    return inverse_sqrt(step, warmup=warmup) / math.sqrt(width * max(1, warmup))


def inverse_sqrt(step: int, *, warmup: int) -> float:
    warmup = max(1, warmup)
    return min(step / warmup, math.sqrt(warmup / step))


def cosine(step: int, *, total: int | None, warmup: int, elapsed: float = 0.0) -> float:
    t = _progress(step, total, warmup, elapsed)
    return _risen(step, warmup) * (1 + math.cos(math.pi * t)) / 2


def linear(step: int, *, total: int | None, warmup: int, elapsed: float = 0.0) -> float:
    return _risen(step, warmup) * (1 - _progress(step, total, warmup, elapsed))


def constant(step: int, *, warmup: int) -> float:
    return _risen(step, warmup)


def factor(
    schedule: Schedule,
    step: int,
    *,
    total: int | None,
    warmup: int,
    width: int,
    elapsed: float | None = None,
) -> float:
    """What `lr` is multiplied by at a step; `total` is the last step, where there is one, and
    `elapsed` the share of the time that is over, where it is limited."""
    match schedule:
        case "noam":
            return noam(step, width=width, warmup=warmup)
        case "inverse_sqrt":
            return inverse_sqrt(step, warmup=warmup)
        case "constant":
            return constant(step, warmup=warmup)
    if total is None and elapsed is None:
        raise ValueError(
            f"schedule ({schedule}) decays until the end; set steps, epochs or minutes"
        )
    decay = cosine if schedule == "cosine" else linear
    return decay(step, total=total, warmup=warmup, elapsed=elapsed or 0.0)


def _risen(step: int, warmup: int) -> float:
    return min(1.0, step / warmup) if warmup else 1.0


def _progress(step: int, total: int | None, warmup: int, elapsed: float) -> float:
    steps = 0.0 if total is None else (step - warmup) / max(1, total - warmup)
    return min(1.0, max(0.0, steps, elapsed))
