"""What small models learn: order, memory over a distance, transfer.

Every number comes from models that are trained within a second or so, on the tasks of
`regard.lab.probe`, once for each seed. A verdict requires that all seeds agree, by a margin.
`ablation` tests single parts of a model.

More than a hundred such models are trained in memory by the fifteen lines of `probe.learn`:
`train/fit.py` trains a run, with a folder, checkpoints and evaluations, which would take longer
than the training itself.
"""

from dataclasses import replace
from functools import partial

import torch

from regard.lab import probe
from regard.lab.claims.ablation import (
    BITS,
    SEEDS,
    SMALL,
    by_seed,
    mean,
    more,
    on_condition,
    scores,
    trained,
)
from regard.lab.experiment import Curve, Experiment, Finding, Plot, Table, by_seeds, corrected
from regard.lab.place import Place
from regard.lab.probe import Task
from regard.model.baseline import Recurrent
from regard.model.classifier import ClassifierConfig, TextClassifier

TEAMS = 5
SENTENCES: Task = partial(probe.winner, batch=32, teams=TEAMS)
ORDERS: Task = partial(probe.order, batch=32, length=8)
BAGS: Task = partial(probe.bag, batch=32, length=8)
ELSEWHERE: Task = partial(probe.ones, places=(0, 3, 5, 8))
"""A task on bits at positions that an encoder was not trained on."""

GAPS = (1, 4, 12, 36)


def without_positions(config: ClassifierConfig) -> ClassifierConfig:
    return replace(config, position="none")


def sentence_order() -> Finding:
    config = replace(SMALL, classes=TEAMS, vocabulary=TEAMS + len(probe.WORDS))
    measured = {
        "with positions": scores(config, SENTENCES, 100),
        "without": scores(without_positions(config), SENTENCES, 100),
    }
    blind, _ = trained(without_positions(config), SENTENCES, 20, seed=0)
    with torch.no_grad():
        sentences = torch.tensor([probe.sentence(3, 1, TEAMS), probe.sentence(1, 3, TEAMS)])
        this, that = blind.double()(sentences)
    return Finding(
        by_seeds(more(*measured.values()), margin=0.3),
        {
            **{f"accuracy {name}": values for name, values in measured.items()},
            "two sentences' logits differ, without positions, by": float((this - that).abs().max()),
        },
        tables=(by_seed("Who plays better? Guessing between the two teams gives 0.5", measured),),
    )


def order_and_bag() -> Finding:
    measured = {
        f"{name}, {positions}": scores(config, task, 100)
        for name, task in (("order", ORDERS), ("bag", BAGS))
        for positions, config in (("with positions", SMALL), ("without", without_positions(SMALL)))
    }
    needed, unneeded = (
        more(measured[f"{name}, with positions"], measured[f"{name}, without"])
        for name in ("order", "bag")
    )
    return Finding(
        by_seeds([a - abs(b) for a, b in zip(needed, unneeded)], margin=0.2),
        measured,
        tables=(by_seed("Accuracy", measured),),
    )


def positions_and_range() -> Finding:
    gap = 30
    task: Task = partial(probe.distance, batch=32, gap=gap)
    config = replace(SMALL, classes=5, pool="last")
    measured = {
        "with positions": scores(config, task, 150),
        "without": scores(without_positions(config), task, 150),
    }
    return Finding(
        corrected(
            taught=min(more(*measured.values())) > 0.1,
            correct=min(measured["without"]) > 0.9,
        ),
        {"tokens between": gap, **measured},
        tables=(by_seed(f"What was the token {gap} tokens ago?", measured),),
    )


def positions_ignored() -> Finding:
    right: dict[str, list[float]] = {}
    changed: dict[str, list[float]] = {}
    for name, task in (("order", ORDERS), ("bag", BAGS)):
        models = [trained(SMALL, task, 100, seed) for seed in SEEDS]
        right[name] = [score for _, score in models]
        changed[name] = [
            _changed_by_shuffles(model, task, seed) for seed, (model, _) in zip(SEEDS, models)
        ]
    used = more(changed["order"], changed["bag"])
    return Finding(
        by_seeds([min(a, 0.25 - b) for a, b in zip(used, changed["bag"])], margin=0.1),
        {
            **{f"accuracy, {name}": values for name, values in right.items()},
            **{f"answers changed by a shuffle, {name}": v for name, v in changed.items()},
        },
        tables=(by_seed("Share of predictions that change when the tokens are shuffled", changed),),
    )


@torch.no_grad()
def _changed_by_shuffles(model: TextClassifier, task: Task, seed: int) -> float:
    """The share of predictions that change when the tokens are shuffled."""
    tokens = torch.cat([task(seed, step).tokens for step in range(1000, 1020)])
    chance = torch.Generator().manual_seed(seed)
    places = torch.rand(tokens.shape, generator=chance).argsort(-1)
    answer, other = (model(t).argmax(-1) for t in (tokens, tokens.gather(1, places)))
    return float((answer != other).double().mean())


def memory_and_distance() -> Finding:
    config = replace(SMALL, classes=5, pool="last")
    measured: dict[str, list[list[float]]] = {"Transformer": [], "LSTM": []}
    for gap in GAPS:
        task: Task = partial(probe.distance, batch=32, gap=gap)
        measured["Transformer"].append(scores(config, task, 150))
        measured["LSTM"].append(
            scores(
                without_positions(config),
                task,
                150,
                attention=lambda position: Recurrent(config.width),
            )
        )
    near, far = (more(measured["Transformer"][n], measured["LSTM"][n]) for n in (0, -1))
    return Finding(
        by_seeds([b - abs(a) for a, b in zip(near, far)], margin=0.3),
        {
            "tokens between": GAPS,
            **{f"accuracy, {name}": values for name, values in measured.items()},
            "multiply-adds for all pairs of tokens": [
                2 * (gap + 2) ** 2 * config.width for gap in GAPS
            ],
        },
        tables=(
            Table(
                "Accuracy, mean of three seeds; chance level 0.2",
                ("tokens between", *measured),
                tuple(
                    (gap, *(mean(values[n]) for values in measured.values()))
                    for n, gap in enumerate(GAPS)
                ),
            ),
        ),
        plots=(
            Plot(
                "What was the first token?",
                "tokens between",
                "accuracy",
                tuple(
                    Curve(name, [float(gap) for gap in GAPS], [mean(each) for each in values])
                    for name, values in measured.items()
                ),
                log_x=True,
            ),
        ),
    )


def reusable_encoder() -> Finding:
    config = replace(BITS, heads=8)
    measured: dict[str, list[float]] = {}
    for seed in SEEDS:
        encoders = {
            "trained": trained(config, probe.number, 150, seed, 2e-2)[0],
            "untrained": probe.fresh(lambda: TextClassifier(config), seed),
        }
        for where, task in (("same", probe.ones), ("other", ELSEWHERE)):
            for name, encoder in encoders.items():
                fixed = encoder.with_classes(5).freeze()
                score = probe.train(fixed, task, 80, lr=3e-2, seed=seed)
                measured.setdefault(f"{where} places, {name} encoder", []).append(score)
    same, other = (
        more(
            measured[f"{where} places, trained encoder"],
            measured[f"{where} places, untrained encoder"],
        )
        for where in ("same", "other")
    )
    return Finding(
        on_condition(same, other, margin=0.1),
        measured,
        tables=(by_seed("How many of four bits are 1? Only the head learns", measured),),
    )


def transfer() -> Finding:
    config = replace(BITS, heads=8)
    measured: dict[str, list[float]] = {"after another task": [], "from scratch": []}
    for seed in SEEDS:
        new = probe.fresh(lambda: TextClassifier(config), seed)
        learned, _ = trained(config, probe.number, 150, seed, 2e-2)
        for values, model in zip(measured.values(), (learned, new)):
            values.append(probe.train(model.with_classes(5), probe.ones, 30, lr=1e-2, seed=seed))
    return Finding(
        by_seeds(more(*measured.values()), margin=0.1),
        measured,
        tables=(by_seed("How many of four bits are 1? After 30 steps", measured),),
    )


EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        item=16,
        name="sentence-order",
        place=Place("slides", "order"),
        taught="The order of words matters: the same words in another order praise another team.",
        method="Sentences such as “A plays better, not B” and “not B, A plays better” are read by "
        "one block with positions and by one without, which learn to name the better team.",
        correct="With positions the better team is found. Without them both sentences are the "
        "same bag of words, so that no training can do better than choose one of the two teams.",
        run=sentence_order,
        trained=True,
    ),
    Experiment(
        item=48,
        name="order-and-bag",
        place=Place("homework", "1.3(b)"),
        taught="Positions are needed where order matters.",
        method="One block learns which of two tokens comes first, and of which of them there are "
        "more, each with positions and without.",
        correct="The task on order is learned only with positions; the task on the bag of tokens "
        "just as well without.",
        run=order_and_bag,
        trained=True,
    ),
    Experiment(
        item=48,
        name="positions-and-range",
        place=Place("homework", "1.3(b)"),
        taught="Positional encodings capture dependencies over long ranges.",
        method="At the end of a row, one block has to name its first token, with positions and "
        "without.",
        correct="A position says where a token stands. What reaches far is attention itself, which "
        "finds a distant token by what it is, also without any position.",
        run=positions_and_range,
        trained=True,
    ),
    Experiment(
        item=98,
        name="positions-ignored",
        place=Place("handout", "positional encoding"),
        taught="A position is information that training may use or ignore.",
        method="Two models of the same kind, both with positions, learn a task on order and one "
        "on a bag of tokens. Then the tokens of new rows are shuffled, and predictions that "
        "change are counted.",
        correct="A model trained on order changes its predictions after a shuffle; one trained on "
        "a bag of tokens has learned to ignore the positions.",
        run=positions_ignored,
        trained=True,
    ),
    Experiment(
        item=35,
        name="memory-and-distance",
        place=Place("sheet", "6-2(e)"),
        taught="Attention reaches any distance at once, a recurrent state is overwritten on the "
        "way; the price is quadratic.",
        method="A block with attention and the same block with an LSTM in its place learn to name "
        "the first token of a row, over growing distances, with equally many steps.",
        correct="At a short distance both learn it. At a long one the LSTM, whose gradient has to "
        "pass through every step between, learns nothing in the same time, while the cost of "
        "attention grows with the square of the length.",
        run=memory_and_distance,
        trained=True,
    ),
    Experiment(
        item=94,
        name="reusable-encoder",
        place=Place("handout", "Transformers"),
        taught="A trained encoder can be reused to extract features for other tasks.",
        method="An encoder that has learned to read the bits at four positions is frozen, and a "
        "new linear head learns how many of four bits are 1: at the same positions, and at "
        "others. An untrained encoder is treated alike.",
        correct="What it has learned serves tasks that need the same features. For others a "
        "frozen encoder is no better, or worse, than an untrained one.",
        run=reusable_encoder,
        trained=True,
    ),
    Experiment(
        item=99,
        name="transfer",
        place=Place("handout", "Transformers"),
        taught="Transformers lend themselves to transfer learning.",
        method="A model that has learned to read the bits at four positions gets a new head and "
        "few steps to learn how many of them are 1; another is trained from scratch.",
        correct="After a related task far fewer steps are needed. The number of parameters is the "
        "same: what transfer saves is training.",
        run=transfer,
        trained=True,
    ),
)
