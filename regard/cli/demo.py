"""The demonstrations: a small model learns before one's eyes, and shows what it has learned.

dates    dates in many languages to ISO 8601, with the attention that finds each digit
digits   handwritten digits, by a Vision Transformer
read     strips of handwritten digits read as text, image in, text out
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from regard.checkpoint import CONFIG
from regard.cli.train import run_training
from regard.config import from_json
from regard.config import read as read_config
from regard.look.plot import grid
from regard.machine.shell import typed
from regard.task.folder import model_folder, run_config
from regard.train.config import TrainingConfig
from regard.train.state import NUMBERS, State

SHOWN = ("en", "de", "fr", "es", "ru", "el", "tr", "ja", "ko", "hi", "th", "vi")
"""Languages of which a date is shown; two of them with their attention."""


def demo(name: str, run: Path) -> None:
    """Trains in `run`, or, where that was done, goes straight to what was learned."""
    shows: dict[str, Callable[[Path], None]] = {"dates": dates, "digits": digits, "read": read}
    if name not in shows:
        raise ValueError(f"demo ({name!r}) is unknown; choose from {', '.join(shows)}")
    if finished(run):
        print(f"{run} was trained before; remove it to see it learn again.\n")
    shows[name](run)


def finished(run: Path) -> bool:
    """Whether a run has made all its steps."""
    config, last = run_config(run), run / "last" / NUMBERS
    if config is None or not last.is_file():
        return False
    steps = from_json(TrainingConfig, config.get("training"), str(run / CONFIG), "training").steps
    done = from_json(State, read_config(last), str(last)).step
    return steps is not None and done >= steps


# Dates


def dates(run: Path) -> None:
    import regard.task.dates as task
    from regard.task.translator import Translator

    config = task.preset("tiny")
    print(
        f"A Transformer learns to read dates in {task.spoken(config.languages)} languages and to "
        "write them as ISO 8601,\ncharacter by character. One day in ten is held out: it is never "
        "seen in any language.\n"
    )
    if not finished(run):
        run_training(task.TASK, config, run)
    translator = Translator.load(run)
    _, held = task.days(config.first, config.last)
    judged = task.write(held, config.languages, config.judged, config.training.seed + 1)
    written = translator.translate([date.text for date in judged])
    right = sum(text == date.iso for text, date in zip(written, judged))
    print(f"\nExact match on {len(judged):,} other held-out dates: {right / len(judged):.1%}\n")
    for language in SHOWN:
        date, text = next(
            (date, text) for date, text in zip(judged, written) if date.language == language
        )
        print(f"  {'✓' if text == date.iso else '✗'} {language:<3} {date.text} → {text}")
    for language in ("de", "ja"):
        date = next(date for date in judged if date.language == language)
        (text,) = translator.translate([date.text])
        found = translator.attention(date.text, text)
        layer, head = copying(found.weights, found.source, found.target)
        print(
            f"\nWhere head {head + 1} of layer {layer + 1} looks while {text} is written:\n"
            + grid(found.weights[layer, head], _signs(found.target), _signs(found.source), indent=2)
        )
    print(
        typed(
            f"\nSaved in {run}: the model in {model_folder(run)}, curves.svg, report.md."
            "\nWhat to try next:"
            f"\n  regard studio {run}      (look inside: heads, words, the beam tree)"
            f'\n  echo "3. Oktober 1990" | regard translate {run}'
            "\n  regard demo digits"
            "\n  regard train translate RUN --source train.en --target train.de"
        )
    )


def _signs(pieces: list[str]) -> list[str]:
    """A space as a space, and the end as one sign."""
    return [{"▁": " ", "</s>": "∎"}.get(piece, piece) for piece in pieces]


def copying(
    weights: Float[Tensor, "layers H L S"], source: list[str], target: list[str]
) -> tuple[int, int]:
    """The layer and the head that look most at the characters that are being written."""
    same = torch.tensor([[s == t for s in source] for t in target], dtype=weights.dtype)
    best = (weights * same).sum((-1, -2)).flatten().argmax()
    layer, head = divmod(int(best), weights.shape[1])
    return layer, head


# Images


def digits(run: Path) -> None:
    import regard.task.classify as task
    from regard.task.classify import Classifier

    config = task.preset("tiny")
    print("A Vision Transformer learns to tell handwritten digits apart, 8 × 8 pixels each.\n")
    if not finished(run):
        run_training(task.TASK, config, run)
    classifier = Classifier.load(run)
    held = task.build(config, run).validation
    assert held.labels is not None
    pixels = held.batch(np.arange(len(held)))
    names = [classifier.labels[n] for n in held.labels.tolist()]
    predicted = classifier.classify(list(pixels))
    share = sum(one == other for one, other in zip(predicted, names)) / len(names)
    print(f"\nRight on {len(names)} held-out digits, which chose its best step: {share:.1%}\n")
    wrong = [n for n, (one, other) in enumerate(zip(predicted, names)) if one != other]
    some = [*range(5), *wrong[:1]]
    blocks = [_drawn(pixels[n, 0]) for n in some]
    for lines in zip(*blocks):
        print("  " + "  ".join(lines))
    labels = [
        f"{predicted[n]} ✓" if predicted[n] == names[n] else f"{predicted[n]} ✗, it is {names[n]}"
        for n in some
    ]
    print("  " + "  ".join(f"{label:<16}" for label in labels).rstrip())
    print(
        typed(
            f"\nSaved in {run}. What to try next:"
            f"\n  regard studio {run}     (look inside: patches, heads; draw a digit)"
            "\n  regard demo read"
            "\n  regard train classify RUN --images FOLDER     (a folder of images for each class)"
        )
    )


def read(run: Path) -> None:
    import regard.task.read as task
    from regard.task.read import Reader

    config = task.preset("tiny")
    print(
        "A Transformer whose encoder sees an image and whose decoder writes text learns to read\n"
        "strips of handwritten digits. The digits of the strips below were never trained on.\n"
    )
    if not finished(run):
        run_training(task.TASK, config, run)
    reader = Reader.load(run)
    held = task.build(config, run).validation
    numbers = held.number(np.arange(held.count), 1)  # other strips than chose the best step
    images, texts = torch.from_numpy(held.images(numbers)), held.texts(numbers)
    texts_read = reader.read(list(images))
    right = sum(one == other for one, other in zip(texts_read, texts))
    print(f"\nRead without a mistake: {right / len(texts):.1%} of {len(texts)} strips\n")
    for n in range(3):
        print("\n".join("  " + line for line in _drawn(images[n, 0], wide=1)))
        print(f"  {'✓' if texts_read[n] == texts[n] else '✗'} {texts_read[n]}\n")
    print(
        typed(
            f"Saved in {run}. What to try next:"
            f"\n  regard studio {run}     (where it looked for each digit; draw a strip)"
            "\n  regard train read RUN --images FOLDER --captions captions.txt"
        )
    )


def _drawn(pixels: UInt8[Tensor, "Y X"], wide: int = 2) -> list[str]:
    """An image in shades; a pixel is `wide` characters, since those are taller than wide."""
    shades = " ░▒▓█"
    levels = (pixels.float() / 255 * (len(shades) - 1)).round().long().tolist()
    return ["".join(shades[level] * wide for level in row) for row in levels]
