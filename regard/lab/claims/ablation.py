"""Ablations: the same small model trained with a part and without it.

Heads, normalisation and scale, on the tasks of `regard.lab.probe`. As in `training`, each model is
trained once for each seed, and verdicts rest on the mean difference and its standard error.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard import MultiHeadAttention
from regard.lab import probe
from regard.lab.claims.sample import parameters, unbuilt
from regard.lab.experiment import (
    Curve,
    Experiment,
    Finding,
    Plot,
    Table,
    by_seeds,
    estimate,
    in_cases,
    on_condition,
)
from regard.lab.numbers import figure
from regard.lab.place import Place
from regard.lab.probe import Task
from regard.model.baseline import Baseline
from regard.model.block import PostNorm, PreNorm
from regard.model.build import MakeAttention
from regard.model.classifier import ClassifierConfig, TextClassifier

SEEDS = range(5)
"""Enough where the effect is large: the error is a small part of it."""
SMALL = ClassifierConfig(2, 13, width=16, heads=2, feed_forward=32, layers=1, dropout=0.0)
"""One block that reads thirteen tokens and has two classes."""
BITS = replace(SMALL, classes=16, vocabulary=2, pool="last")
"""The same for tasks on bits, with the logits read at the last position."""

HEADS = (1, 2, 4, 8)
NOISES = (0.0, 0.5, 1.0, 2.0)


def trained(
    config: ClassifierConfig,
    task: Task,
    steps: int,
    seed: int,
    lr: float = 1e-2,
    attention: MakeAttention | None = None,
) -> tuple[TextClassifier, float]:
    """A trained model and its accuracy."""
    model = probe.fresh(lambda: TextClassifier(config, attention=attention), seed)
    return model, probe.train(model, task, steps, lr=lr, seed=seed)


def scores(
    config: ClassifierConfig,
    task: Task,
    steps: int,
    lr: float = 1e-2,
    attention: MakeAttention | None = None,
) -> list[float]:
    """The accuracy of one trained model for each seed."""
    return [trained(config, task, steps, seed, lr, attention)[1] for seed in SEEDS]


def more(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """The difference for each seed."""
    return [value - other for value, other in zip(values, others, strict=True)]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def levels(title: str, measured: Mapping[str, Sequence[float]]) -> Table:
    """The mean of all seeds, its standard error, and the lowest and highest seed."""
    rows = tuple(
        (name, estimate(values).level, min(values), max(values))
        for name, values in measured.items()
    )
    return Table(title, ("", "mean ± standard error", "lowest", "highest"), rows)


def heads_at_once() -> Finding:
    several: Task = probe.number
    single: Task = partial(probe.number, places=(4,))
    first, last = HEADS[0], HEADS[-1]
    many = {heads: scores(replace(BITS, heads=heads), several, 150, 2e-2) for heads in HEADS}
    one = {n: scores(replace(BITS, heads=n, classes=2), single, 120) for n in (first, last)}
    sizes = [_parameters(replace(BITS, heads=heads)) for heads in HEADS]
    four_places, one_place = more(many[last], many[first]), more(one[last], one[first])
    return Finding(
        on_condition(four_places, one_place, margin=0.2),
        {
            "parameters": sizes,
            **{f"four places, {heads} heads": values for heads, values in many.items()},
            **{f"one place, {heads} heads": values for heads, values in one.items()},
        },
        tables=(
            levels(
                f"Accuracy, {len(SEEDS)} seeds",
                {
                    **{f"bits at four places, {n} heads": v for n, v in many.items()},
                    **{f"bit at one place, {n} heads": v for n, v in one.items()},
                },
            ),
        ),
        plots=(
            Plot(
                "Reading four places at once",
                "heads",
                "accuracy",
                tuple(
                    Curve(f"seed {seed}", list(map(float, HEADS)), [many[h][n] for h in HEADS])
                    for n, seed in enumerate(SEEDS)
                ),
                log_x=True,
            ),
        ),
        conclusion=f"Where four places must be read at once, {last} heads gain "
        f"{estimate(four_places)} in accuracy over one, with {figure(sizes[-1])} parameters "
        f"against {figure(sizes[0])}: one head has a single weighted mean. Where one place "
        f"suffices, they gain {estimate(one_place)}.",
    )


def heads_and_noise() -> Finding:
    seeds = range(12)
    tasks: dict[str, tuple[ClassifierConfig, Task]] = {
        "order": (SMALL, partial(probe.order, batch=32, length=8)),
        "bag": (SMALL, partial(probe.bag, batch=32, length=8)),
        "distance": (replace(SMALL, classes=5), partial(probe.distance, batch=32, gap=8)),
    }
    kept: dict[tuple[str, int], list[list[float]]] = {}
    for name, (config, task) in tasks.items():
        for heads in (1, 4):
            models = (trained(replace(config, heads=heads), task, 100, s)[0] for s in seeds)
            kept[name, heads] = [
                [_under_noise(model, task, noise, seed) for noise in NOISES]
                for seed, model in zip(seeds, models)
            ]
    clean = {key: [row[0] for row in rows] for key, rows in kept.items()}
    noisy = {key: [mean(row[1:]) for row in rows] for key, rows in kept.items()}
    ahead = {name: more(clean[name, 4], clean[name, 1]) for name in tasks}
    gained = {name: more(noisy[name, 4], noisy[name, 1]) for name in tasks}
    # How much less noise takes away: sensitivity proper, whatever the accuracy without it.
    spared = {name: more(gained[name], ahead[name]) for name in tasks}
    fewer = [name for name in tasks if estimate(spared[name]).exceeds(0.0)]

    def each(gains: Mapping[str, Sequence[float]]) -> str:
        return ", ".join(f"{estimate(gains[name])} ({name})" for name in tasks)

    return Finding(
        in_cases(spared.values()),
        {
            "seeds": len(seeds),
            **{f"{name}: gained under noise by four heads": v for name, v in gained.items()},
            **{f"{name}: ahead without noise by four heads": v for name, v in ahead.items()},
            **{
                f"{name}: taken away by noise, less with four heads by": spared[name]
                for name in tasks
            },
        },
        tables=(
            Table(
                f"Accuracy, mean of {len(seeds)} seeds",
                ("task", "heads", *(f"noise {noise:g}" for noise in NOISES)),
                tuple(
                    (name, heads, *(mean(column) for column in zip(*rows)))
                    for (name, heads), rows in kept.items()
                ),
            ),
            Table(
                "Four heads against one, mean ± standard error",
                ("task", "without noise", "under noise", "what noise takes away is less by"),
                tuple(
                    (name, *(str(estimate(each[name])) for each in (ahead, gained, spared)))
                    for name in tasks
                ),
            ),
        ),
        conclusion=f"Under noise four heads are more accurate than one by {each(gained)}, mean and "
        f"standard error of {len(seeds)} seeds. Without noise they are ahead by {each(ahead)}, so "
        f"that noise takes away less by {each(spared)}; that is beyond three standard errors in "
        f"{len(fewer)} of {len(tasks)} tasks.",
    )


def _under_noise(model: TextClassifier, task: Task, noise: float, seed: int) -> float:
    """The accuracy with normal noise added to every token's embedding."""
    chance = torch.Generator().manual_seed(seed)

    def add_noise(module: nn.Module, args: object, x: Tensor) -> Tensor:
        return x + noise * torch.randn(x.shape, generator=chance)

    hook = model.tokens.register_forward_hook(add_noise)
    right = probe.accuracy(model, task, range(1000, 1020), seed)
    hook.remove()
    return right


def layer_norm() -> Finding:
    seeds, steps, goal = range(6), 30, 0.35
    low, high = 3e-3, 1.2e-2
    cases = {"6 blocks, high rate": (6, high), "6 blocks, low rate": (6, low)}
    cases["2 blocks, high rate"] = (2, high)
    kinds = ("post-norm", "pre-norm", "none")
    losses = {
        (case, kind): [_normalised(kind, layers, rate, seed, steps) for seed in seeds]
        for case, (layers, rate) in cases.items()
        for kind in kinds
    }
    last = {key: [min(mean(run[-5:]), 1e6) for run in runs] for key, runs in losses.items()}
    taken = {key: [_steps_to(goal, run) for run in runs] for key, runs in losses.items()}
    # In logarithms: where training diverges, the loss of one seed is many times another's.
    lower = {
        case: [math.log(a / b) for a, b in zip(last[case, "none"], last[case, "post-norm"])]
        for case in cases
    }
    sooner = {case: more(taken[case, "none"], taken[case, "post-norm"]) for case in cases}
    deep, gentle, shallow = cases
    return Finding(
        in_cases((lower[deep], *sooner.values())),
        {
            "seeds": len(seeds),
            **{f"last loss, {case}, {kind}": values for (case, kind), values in last.items()},
            **{f"steps to {goal}, {case}, {kind}": v for (case, kind), v in taken.items()},
        },
        tables=(
            Table(
                f"Loss after {steps} steps (chance level 0.69), mean ± standard error",
                ("", *kinds),
                tuple(
                    (case, *(estimate(last[case, kind]).level for kind in kinds)) for case in cases
                ),
            ),
            Table(
                f"Steps until the loss is below {goal}, {steps + 1} where it never is",
                ("", *kinds),
                tuple(
                    (case, *(estimate(taken[case, kind]).level for kind in kinds)) for case in cases
                ),
            ),
        ),
        conclusion="In six blocks at a high learning rate the last loss is "
        f"{mean(last[deep, 'post-norm']):.2f} with post-norm, {mean(last[deep, 'pre-norm']):.2f} "
        f"with pre-norm and {mean(last[deep, 'none']):.2f} with none. A loss of {goal} is reached "
        f"sooner with post-norm than with none by {estimate(sooner[deep])} steps there, by "
        f"{estimate(sooner[gentle])} at a low rate, and by {estimate(sooner[shallow])} in two "
        "blocks.",
    )


def _normalised(kind: str, layers: int, rate: float, seed: int, steps: int) -> list[float]:
    """Each step's loss, without warm-up or gradient clipping to stabilise the training."""
    pre = kind == "pre-norm"
    config = replace(SMALL, layers=layers, norm="pre" if pre else "post", final_norm=pre)
    model = probe.fresh(lambda: TextClassifier(config), seed)
    if kind == "none":
        _remove_norms(model)
    task: Task = partial(probe.bag, batch=32, length=8)
    return probe.learn(model, task, steps, lr=rate, warmup=0, clip=math.inf, seed=seed)


def _steps_to(goal: float, losses: Sequence[float], window: int = 5) -> float:
    """The step at which the mean of the last few losses falls below the goal, or one too many."""
    for step in range(window, len(losses) + 1):
        if mean(losses[step - window : step]) < goal:
            return float(step)
    return len(losses) + 1.0


def _remove_norms(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, PostNorm | PreNorm):
            module.norm = nn.Identity()  # type: ignore[assignment]


def scale_and_training() -> Finding:
    teams, width, key_widths = 5, 32, (4, 256)
    config = replace(
        SMALL,
        classes=teams,
        vocabulary=teams + len(probe.WORDS),
        width=width,
        heads=1,
        pool="last",
    )
    task: Task = partial(probe.winner, batch=32, teams=teams)
    losses: dict[str, list[float]] = {}
    right: dict[str, list[float]] = {}
    for key_width in key_widths:
        for scaled, beta in (("scaled", None), ("unscaled", 1.0)):
            make = partial(_one_head, width, key_width, beta)
            name = f"keys {key_width} wide, {scaled}"
            losses[name], right[name] = [], []
            for seed in SEEDS:
                model = probe.fresh(partial(TextClassifier, config, attention=make), seed)
                losses[name].append(mean(probe.learn(model, task, 100, lr=3e-3, seed=seed)))
                right[name].append(probe.accuracy(model, task, range(101, 121), seed))
    narrow, wide = (
        more(losses[f"keys {n} wide, unscaled"], losses[f"keys {n} wide, scaled"])
        for n in key_widths
    )
    return Finding(
        by_seeds(wide, margin=0.2),
        {
            **{f"mean loss while learning, {name}": values for name, values in losses.items()},
            **{f"accuracy after 100 steps, {name}": values for name, values in right.items()},
        },
        tables=(
            levels(f"Mean loss over 100 steps, {len(SEEDS)} seeds", losses),
            levels("Accuracy afterwards", right),
        ),
        conclusion=f"With keys {key_widths[1]} wide, whose dot products are large, the mean loss "
        f"of 100 steps is higher by {estimate(wide)} without the scale, and the accuracy after "
        f"them {mean(right[f'keys {key_widths[1]} wide, unscaled']):.0%} against "
        f"{mean(right[f'keys {key_widths[1]} wide, scaled']):.0%}. With keys {key_widths[0]} wide "
        f"the loss is higher by {estimate(narrow)}.",
    )


def _one_head(width: int, key_width: int, beta: float | None, position: object) -> nn.Module:
    return MultiHeadAttention(width, 1, key_width=key_width, value_width=width, beta=beta)


class Filters(Baseline):
    """A convolution with fewer filters than the width, and a linear map back to it."""

    def __init__(self, width: int, filters: int, kernel: int):
        super().__init__(width)
        self.convolution = nn.Conv1d(width, filters, kernel, padding=kernel // 2)
        self.output = nn.Linear(filters, width)

    def mix(
        self, x: Float[Tensor, "B L D"], causal: bool, lengths: Int[Tensor, " B"] | None
    ) -> Float[Tensor, "B L D"]:
        return self.output(self.convolution(x.transpose(1, 2)).transpose(1, 2))


def heads_and_filters() -> Finding:
    numbers = (1, 4, 8)
    width, reach = BITS.width, 21  # from the last of eleven bits to the first

    def filters(n: int) -> MakeAttention:
        return lambda position: Filters(width, n, reach)

    # As many steps as the largest number of each needs.
    learned = {
        "heads": [scores(replace(BITS, heads=n), probe.number, 150, 2e-2) for n in numbers],
        "filters": [scores(BITS, probe.number, 60, 2e-2, filters(n)) for n in numbers],
    }
    sizes = {
        "heads": [_parameters(replace(BITS, heads=n)) for n in numbers],
        "filters": [_parameters(BITS, filters(n)) for n in numbers],
    }
    gains = {name: more(each[-1], each[0]) for name, each in learned.items()}
    return Finding(
        by_seeds([min(pair) for pair in zip(*gains.values())], margin=0.2),
        {
            "how many": numbers,
            **{f"accuracy, {name}": each for name, each in learned.items()},
            **{f"parameters, {name}": each for name, each in sizes.items()},
        },
        tables=(
            Table(
                f"Four bits read at once, mean ± standard error of {len(SEEDS)} seeds",
                ("how many", "as heads", "parameters", "as filters", "parameters"),
                tuple(
                    (
                        n,
                        estimate(learned["heads"][k]).level,
                        sizes["heads"][k],
                        estimate(learned["filters"][k]).level,
                        sizes["filters"][k],
                    )
                    for k, n in enumerate(numbers)
                ),
            ),
        ),
        conclusion=f"More of either reads more at once: from {numbers[0]} to {numbers[-1]} heads "
        f"gain {estimate(gains['heads'])} in accuracy, filters {estimate(gains['filters'])}. They "
        f"differ in parameters: {figure(sizes['heads'])} for heads, which share the width, and "
        f"{figure(sizes['filters'])} for filters.",
    )


def _parameters(config: ClassifierConfig, attention: MakeAttention | None = None) -> int:
    return parameters(unbuilt(lambda: TextClassifier(config, attention=attention)))


EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        item=60,
        name="heads-at-once",
        place=Place("homework", "1.4(c)"),
        taught="Multi-head attention can help to generate richer and more complex representations, "
        "as several sets of matrices capture different aspects of the input.",
        method="One block of the same width, and so of the same number of parameters, with 1 to 8 "
        "heads learns to read the bits at four positions of a row at once, and at one position.",
        run=heads_at_once,
        equations=(
            r"\mathrm{head}_h = \mathrm{softmax}\left(\beta\, Q_h K_h^\top\right) V_h",
            r"\left[\mathrm{head}_1;\dots;\mathrm{head}_H\right] W_O",
        ),
        trained=True,
    ),
    Experiment(
        item=61,
        name="heads-and-noise",
        place=Place("homework", "1.4(c)"),
        taught="The multi-head model is also less sensitive to noisy data; no reason is given.",
        method="Models with one head and with four learn three tasks from clean tokens, and are "
        "evaluated with normal noise added to every token's embedding, for twelve seeds. Compared "
        "are the accuracy under noise, and what noise takes away from it.",
        run=heads_and_noise,
        trained=True,
    ),
    Experiment(
        item=65,
        name="layer-norm",
        place=Place("homework", "1.4(e)"),
        taught="Layer normalisation, LayerNorm(x + Sublayer(x)), helps to stabilise and accelerate "
        "training.",
        method="Two blocks and six learn of which of two tokens there are more, with LayerNorm "
        "after each sum (post-norm), before each sublayer (pre-norm) and with none, at a low and "
        "at a high learning rate, without warm-up or gradient clipping: the loss at the end, and "
        "the steps it takes.",
        run=layer_norm,
        equations=(
            r"\mathrm{LayerNorm}(x + \mathrm{Sublayer}(x))",
            r"x + \mathrm{Sublayer}(\mathrm{LayerNorm}(x))",
        ),
        trained=True,
    ),
    Experiment(
        item=100,
        name="scale-and-training",
        place=Place("handout", "scores"),
        taught="Dividing the scores by √d_k is optional, but was found to help in training.",
        method="One block with one head learns from sentences which team plays better, with "
        "β = 1/√d_k and with β = 1, for narrow keys and for wide ones.",
        run=scale_and_training,
        equations=(r"\mathrm{softmax}\left(\frac{Q K^\top}{\sqrt{d_k}}\right) V",),
        trained=True,
    ),
    Experiment(
        item=101,
        name="heads-and-filters",
        place=Place("handout", "multi-head"),
        taught="The number of heads corresponds loosely to the number of filters of a "
        "convolutional layer.",
        method="One block reads the bits at four positions at once, either with 1 to 8 heads or "
        "with a convolution of 1 to 8 filters over the whole row. Parameters are counted as well.",
        run=heads_and_filters,
        trained=True,
    ),
)
