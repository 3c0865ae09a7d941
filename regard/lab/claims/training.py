"""What small models learn: order, memory over a distance, transfer.

Every number comes from models that are trained within a second or so, on the tasks of
`regard.lab.probe`, once for each seed. A verdict rests on the mean difference and its standard
error. `ablation` tests single parts of a model.

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
    levels,
    mean,
    more,
    scores,
    trained,
)
from regard.lab.experiment import (
    Curve,
    Experiment,
    Finding,
    Plot,
    Table,
    by_seeds,
    estimate,
    on_condition,
)
from regard.lab.numbers import figure
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

GAPS = (1, 4, 12)
"""Tokens between a question and its answer."""
LABELLED = 64
"""Rows of a small labelled set."""


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
    gained = more(*measured.values())
    logits = float((this - that).abs().max())
    return Finding(
        by_seeds(gained, margin=0.3),
        {
            **{f"accuracy {name}": values for name, values in measured.items()},
            "two sentences' logits differ, without positions, by": logits,
        },
        tables=(levels("Who plays better? Guessing between the two teams gives 0.5", measured),),
        conclusion="With positions the better team is found in "
        f"{mean(measured['with positions']):.0%} of the sentences, without them in "
        f"{mean(measured['without']):.0%}, a difference of {estimate(gained)}. Without positions "
        f"both sentences are one bag of words: their logits differ by {figure(logits)}, so that no "
        "training can do better than guess.",
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
        tables=(levels(f"Accuracy, {len(SEEDS)} seeds", measured),),
        conclusion=f"Which of two tokens comes first is learned with positions: they gain "
        f"{estimate(needed)} in accuracy. Of which there are more is learned without them: there "
        f"they gain {estimate(unneeded)}.",
    )


def positions_and_range() -> Finding:
    gap = 24
    config = replace(SMALL, classes=5, pool="last", width=32, heads=4)
    measured = {}
    for kind, alike, steps in (("like the others", True, 150), ("of a kind of its own", False, 60)):
        task: Task = partial(probe.distance, batch=32, gap=gap, alike=alike)
        for name, model in (("with", config), ("without", without_positions(config))):
            measured[f"token {kind}, {name} positions"] = scores(model, task, steps, 6e-3)
    needed, unneeded = (
        more(measured[f"{kind}, with positions"], measured[f"{kind}, without positions"])
        for kind in ("token like the others", "token of a kind of its own")
    )
    blind = measured["token like the others, without positions"]
    return Finding(
        on_condition(needed, unneeded, margin=0.2),
        {"tokens between": gap, **measured},
        tables=(levels(f"What was the token {gap + 1} tokens ago? Chance level 0.2", measured),),
        conclusion="Where the distant token is like those between, only its position tells it "
        f"from them: positions gain {estimate(needed)} in accuracy, and without them it is "
        f"{estimate(blind).level}, with a chance level of 0.2. Where it is of a kind of its own, "
        f"attention finds it by what it is, and they gain {estimate(unneeded)}.",
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
        tables=(levels("Share of predictions that change when the tokens are shuffled", changed),),
        conclusion=f"A model trained on order changes {mean(changed['order']):.0%} of its "
        f"predictions when the tokens are shuffled, one trained on a bag of tokens "
        f"{mean(changed['bag']):.0%}, a difference of {estimate(used)}; both have positions.",
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
        task: Task = partial(probe.distance, batch=32, gap=gap, alike=True)
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
    products = [2 * (gap + 2) ** 2 * config.width for gap in GAPS]
    return Finding(
        by_seeds([b - abs(a) for a, b in zip(near, far)], margin=0.3),
        {
            "tokens between": GAPS,
            **{f"accuracy, {name}": values for name, values in measured.items()},
            "multiply-adds for all pairs of tokens": products,
        },
        tables=(
            Table(
                f"Accuracy, mean ± standard error of {len(SEEDS)} seeds; chance level 0.2",
                ("tokens between", *measured),
                tuple(
                    (gap, *(estimate(values[n]).level for values in measured.values()))
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
        conclusion=f"With {GAPS[0]} token between, attention is ahead of an LSTM by "
        f"{estimate(near)} in accuracy, with {GAPS[-1]} by {estimate(far)}, after equally many "
        f"steps: there the LSTM is right in {mean(measured['LSTM'][-1]):.0%}, with a chance level "
        f"of 20%. The price is quadratic: {products[0]:,} and {products[-1]:,} multiply-adds for "
        "all pairs.",
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
                fixed = encoder.replace_head(5).freeze_backbone()
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
        tables=(levels("How many of four bits are 1? Only the head learns", measured),),
        conclusion=f"Frozen, the trained encoder gains {estimate(same)} in accuracy over an "
        f"untrained one for a task on the places that it has learned to read, and "
        f"{estimate(other)} for a task on other places: what it has learned serves tasks that need "
        "the same features.",
    )


def transfer() -> Finding:
    config = replace(BITS, heads=8)

    def labelled(seed: int, step: int) -> probe.Asked:
        """The same few rows at every step."""
        return probe.ones(seed, 0, batch=LABELLED)

    measured: dict[str, list[float]] = {"pre-trained": [], "from scratch": []}
    for seed in SEEDS:
        new = probe.fresh(lambda: TextClassifier(config), seed)
        learned, _ = trained(config, probe.number, 150, seed, 2e-2)
        for values, model in zip(measured.values(), (learned, new)):
            tuned = model.replace_head(5)
            probe.learn(tuned, labelled, 60, lr=1e-2, seed=seed)
            values.append(probe.accuracy(tuned, probe.ones, range(1, 21), seed))
    gained = more(*measured.values())
    return Finding(
        by_seeds(gained, margin=0.1),
        measured,
        tables=(levels(f"How many of four bits are 1? Learned from {LABELLED} rows", measured),),
        conclusion=f"From {LABELLED} labelled rows, a pre-trained encoder with a new head reaches "
        f"{mean(measured['pre-trained']):.0%} on others, the same model from scratch "
        f"{mean(measured['from scratch']):.0%}: a gain of {estimate(gained)}.",
    )


EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        item=16,
        name="sentence-order",
        place=Place("slides", "order"),
        taught="Without order, processing sequences is strongly limited: a sentence that praises "
        "one team and the same words with the names exchanged can't be told apart.",
        method="Sentences such as “A plays better, not B” and “not B, A plays better” are read by "
        "one block with positions and by one without, which learn to name the better team.",
        run=sentence_order,
        trained=True,
    ),
    Experiment(
        item=48,
        name="order-and-bag",
        place=Place("homework", "1.3(b)"),
        taught="Positional encoding is needed where the order of the input matters, and not where "
        "it does not.",
        method="One block learns which of two tokens comes first, and of which of them there are "
        "more, each with positions and without.",
        run=order_and_bag,
        trained=True,
    ),
    Experiment(
        item=48,
        name="positions-and-range",
        place=Place("homework", "1.3(b)"),
        taught="Whether a dependency over a long range needs positions: it does where the distant "
        "token can be told by its place alone.",
        method="At the end of a row, one block has to name its first token, with positions and "
        "without; the tokens between are of the same kind as the first, or of another.",
        run=positions_and_range,
        trained=True,
        kind="added",
    ),
    Experiment(
        item=98,
        name="positions-ignored",
        place=Place("handout", "positional encoding"),
        taught="It is up to training to learn what to do with the position, or to ignore it.",
        method="Two models of the same kind, both with positions, learn a task on order and one "
        "on a bag of tokens. Then the tokens of new rows are shuffled, and predictions that "
        "change are counted.",
        run=positions_ignored,
        trained=True,
    ),
    Experiment(
        item=35,
        name="memory-and-distance",
        place=Place("sheet", "6-2(e)"),
        taught="With global attention Transformers are well-suited for long-range dependencies; "
        "RNNs often struggle to preserve information, as their state is updated with every input. "
        "The downside of attention is its quadratic complexity.",
        method="A block with attention and the same block with an LSTM in its place learn to name "
        "the first token of a row, among tokens of the same kind, over growing distances, with "
        "equally many steps.",
        run=memory_and_distance,
        trained=True,
    ),
    Experiment(
        item=94,
        name="reusable-encoder",
        place=Place("handout", "Transformers"),
        taught="The encoder's representation is meaningful, and can be reused for other tasks, as "
        "VGG's features are.",
        method="An encoder that has learned to read the bits at four positions is frozen, and a "
        "new linear head learns how many of four bits are 1: at the same positions, and at "
        "others. An untrained encoder is treated alike.",
        run=reusable_encoder,
        trained=True,
    ),
    Experiment(
        item=107,
        name="transfer",
        place=Place("handout", "Transformers"),
        taught="As with VGG, the encoder could be reused by transfer learning.",
        method="A model that has learned to read the bits at four positions gets a new head, and "
        "few labelled rows to learn how many of them are 1; another is trained on the same rows "
        "from scratch. Both are tested on other rows.",
        run=transfer,
        trained=True,
    ),
)
