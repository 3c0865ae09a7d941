"""Ablations: the same small model trained with a part and without it.

Heads, normalisation and scale, on the tasks of `regard.lab.probe`. As in `training`, each model is
trained once for each seed, and a verdict requires that all seeds agree, by a margin.
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
    Verdict,
    by_seeds,
    conditional,
)
from regard.lab.place import Place
from regard.lab.probe import Task
from regard.model.baseline import Baseline
from regard.model.block import PreNorm
from regard.model.build import MakeAttention
from regard.model.classifier import ClassifierConfig, TextClassifier

SEEDS = (0, 1, 2)
SMALL = ClassifierConfig(2, 13, width=16, heads=2, feed_forward=32, layers=1, dropout=0.0)
"""One block that reads thirteen tokens and has two classes."""
BITS = replace(SMALL, classes=16, vocabulary=2, pool="last")
"""The same for tasks on bits, with the logits read at the last position."""

HEADS = (1, 2, 4, 8)
DEPTHS = (2, 6)
RATES = (3e-3, 3e-2)
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


def by_seed(title: str, measured: Mapping[str, Sequence[float]]) -> Table:
    head = ("", *(f"seed {seed}" for seed in SEEDS))
    return Table(title, head, tuple((name, *values) for name, values in measured.items()))


def on_condition(inside: Sequence[float], outside: Sequence[float], margin: float) -> Verdict:
    """From each seed's gain, where one is expected and where none is; all seeds have to agree."""
    expected = by_seeds(inside, margin)
    if expected != "holds":
        return expected
    further = by_seeds([gain - margin for gain in outside], 0.0)
    return further if further == "undecided" else conditional(True, further == "holds")


def heads_at_once() -> Finding:
    several: Task = probe.number
    single: Task = partial(probe.number, places=(4,))
    first, last = HEADS[0], HEADS[-1]
    many = {heads: scores(replace(BITS, heads=heads), several, 150, 2e-2) for heads in HEADS}
    one = {n: scores(replace(BITS, heads=n, classes=2), single, 120) for n in (first, last)}
    sizes = [_parameters(replace(BITS, heads=heads)) for heads in HEADS]
    return Finding(
        on_condition(more(many[last], many[first]), more(one[last], one[first]), margin=0.2),
        {
            "parameters": sizes,
            **{f"four places, {heads} heads": values for heads, values in many.items()},
            **{f"one place, {heads} heads": values for heads, values in one.items()},
        },
        tables=(
            by_seed("The bits at four places", {f"{n} heads": v for n, v in many.items()}),
            by_seed("The bit at one place", {f"{n} heads": v for n, v in one.items()}),
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
    )


def heads_and_noise() -> Finding:
    tasks: dict[str, tuple[ClassifierConfig, Task]] = {
        "order": (SMALL, partial(probe.order, batch=32, length=8)),
        "bag": (SMALL, partial(probe.bag, batch=32, length=8)),
        "distance": (replace(SMALL, classes=5), partial(probe.distance, batch=32, gap=8)),
    }
    kept: dict[tuple[str, int], list[list[float]]] = {}
    for name, (config, task) in tasks.items():
        for heads in (1, 4):
            models = (trained(replace(config, heads=heads), task, 100, s)[0] for s in SEEDS)
            kept[name, heads] = [
                [_under_noise(model, task, noise, seed) for noise in NOISES]
                for seed, model in zip(SEEDS, models)
            ]
    noisy = {key: [mean(row[1:]) for row in rows] for key, rows in kept.items()}
    gained = {name: more(noisy[name, 4], noisy[name, 1]) for name in tasks}
    return Finding(
        by_seeds([gain for gains in gained.values() for gain in gains], margin=0.05),
        {
            **{f"{name}, {heads} heads, under noise": v for (name, heads), v in noisy.items()},
            **{f"{name}, gained by four heads": v for name, v in gained.items()},
        },
        tables=(
            Table(
                "Accuracy, mean of three seeds",
                ("task", "heads", *(f"noise {noise:g}" for noise in NOISES)),
                tuple(
                    (name, heads, *(mean(column) for column in zip(*rows)))
                    for (name, heads), rows in kept.items()
                ),
            ),
            by_seed("What four heads gain under noise", gained),
        ),
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
    task: Task = partial(probe.bag, batch=32, length=8)
    names = {True: "with LayerNorm", False: "without"}

    def losses(layers: int, norms: bool, rate: float) -> list[float]:
        """The final loss, without warm-up or gradient clipping to stabilise the training."""
        config = replace(SMALL, layers=layers, norm="pre", final_norm=norms)
        final = []
        for seed in SEEDS:
            model = probe.fresh(lambda: TextClassifier(config), seed)
            if not norms:
                _remove_norms(model)
            learned = probe.learn(model, task, 40, lr=rate, warmup=0, clip=math.inf, seed=seed)
            final.append(mean(learned[-10:]))
        return final

    measured = {
        (layers, rate): {norms: losses(layers, norms, rate) for norms in names}
        for layers in DEPTHS
        for rate in RATES
    }
    fast = [measured[layers, RATES[-1]] for layers in DEPTHS]
    shallow, deep = (more(pair[False], pair[True]) for pair in fast)
    return Finding(
        on_condition(deep, shallow, margin=0.3),
        {
            f"loss, {layers} blocks, learning rate {rate:g}, {name}": pair[norms]
            for (layers, rate), pair in measured.items()
            for norms, name in names.items()
        },
        tables=(
            Table(
                "Loss after 40 steps, mean of three seeds; chance level 0.69",
                ("blocks", "learning rate", *names.values()),
                tuple(
                    (layers, rate, *(mean(pair[norms]) for norms in names))
                    for (layers, rate), pair in measured.items()
                ),
            ),
        ),
    )


def _remove_norms(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, PreNorm):
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
    wide = f"keys {key_widths[-1]} wide"
    return Finding(
        by_seeds(more(losses[f"{wide}, unscaled"], losses[f"{wide}, scaled"]), margin=0.2),
        {
            **{f"mean loss while learning, {name}": values for name, values in losses.items()},
            **{f"accuracy after 100 steps, {name}": values for name, values in right.items()},
        },
        tables=(
            by_seed("Mean loss over 100 steps", losses),
            by_seed("Accuracy afterwards", right),
        ),
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
    gained = zip(*(more(each[-1], each[0]) for each in learned.values()))
    worth = by_seeds([min(gains) for gains in gained], margin=0.2)
    grown = all(each[0] < each[-1] for each in sizes.values())
    return Finding(
        conditional(inside=True, outside=grown) if worth == "holds" else worth,
        {
            "how many": numbers,
            **{f"accuracy, {name}": each for name, each in learned.items()},
            **{f"parameters, {name}": each for name, each in sizes.items()},
        },
        tables=(
            Table(
                "Four bits read at once, mean of three seeds",
                ("how many", "as heads", "parameters", "as filters", "parameters"),
                tuple(
                    (
                        n,
                        mean(learned["heads"][k]),
                        sizes["heads"][k],
                        mean(learned["filters"][k]),
                        sizes["filters"][k],
                    )
                    for k, n in enumerate(numbers)
                ),
            ),
        ),
    )


def _parameters(config: ClassifierConfig, attention: MakeAttention | None = None) -> int:
    return parameters(unbuilt(lambda: TextClassifier(config, attention=attention)))


EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        item=60,
        name="heads-at-once",
        place=Place("homework", "1.4(c)"),
        taught="Several heads give richer representations than one.",
        method="One block of the same width, and so of the same number of parameters, with 1 to 8 "
        "heads learns to read the bits at four positions of a row at once, and at one position.",
        correct="Where several positions must be read at once, several heads learn it and one "
        "does not: it has only one weighted mean. Where one position suffices, one head is as "
        "good.",
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
        taught="Several heads make attention less sensitive to noise.",
        method="Models with one head and with four learn three tasks from clean tokens, and are "
        "evaluated with normal noise added to every token's embedding. The accuracy under noise "
        "is compared for each task and each seed.",
        correct="Nothing of the kind follows from the number of heads alone: what four heads gain "
        "or lose under noise differs from task to task and from seed to seed.",
        run=heads_and_noise,
        trained=True,
    ),
    Experiment(
        item=65,
        name="layer-norm",
        place=Place("homework", "1.4(e)"),
        taught="LayerNorm stabilises and speeds up training.",
        method="Two blocks and six learn of which of two tokens there are more, with a LayerNorm "
        "before each sublayer and with none, at a low and at a high learning rate, without "
        "warm-up or gradient clipping.",
        correct="It lets six blocks train at a high learning rate, at which they diverge without "
        "it. With two blocks, or at a low rate, both learn.",
        run=layer_norm,
        equations=(r"x + \mathrm{Sublayer}(\mathrm{LayerNorm}(x))",),
        trained=True,
    ),
    Experiment(
        item=100,
        name="scale-and-training",
        place=Place("handout", "scores"),
        taught="Scaling the scores is optional, but helps training.",
        method="One block with one head learns from sentences which team plays better, with "
        "β = 1/√K and with β = 1, for narrow keys and for wide ones.",
        correct="With wide keys, whose dot products are large, training without the scale falls "
        "behind for every seed, though it learns something. With narrow keys it rarely matters.",
        run=scale_and_training,
        equations=(r"\mathrm{softmax}\left(\frac{Q K^\top}{\sqrt{K}}\right) V",),
        trained=True,
    ),
    Experiment(
        item=101,
        name="heads-and-filters",
        place=Place("handout", "multi-head"),
        taught="The number of heads is like the number of a convolution's filters.",
        method="One block reads the bits at four positions at once, either with 1 to 8 heads or "
        "with a convolution of 1 to 8 filters over the whole row. Parameters are counted as well.",
        correct="More of either reads more at once. But more filters are more parameters, while "
        "heads divide a fixed width, and their weights are computed anew for every row.",
        run=heads_and_filters,
        trained=True,
    ),
)
