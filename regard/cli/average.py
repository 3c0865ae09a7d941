"""The command `average`: one model from several, whose weights are the mean of theirs.

Checkpoints of one run, or runs that began with the same weights, lie so close together that their
mean is a model too, and often a better one (Vaswani et al. 2017, section 6.1; Izmailov et al.
2018). Runs that began differently have no such mean: they translate together as an ensemble.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from regard import checkpoint
from regard.config import differences, to_json
from regard.task.folder import check_new, model_folder
from regard.train.checkpointer import BESTS
from regard.train.state import NUMBERS, TENSORS


def average(folders: Sequence[str], out: str) -> None:
    """`regard average RUN … NEW`."""
    check_new(out)
    places = [place for folder in folders for place in _models(Path(folder))]
    if len(places) < 2:
        raise ValueError(
            f"{folders[0]} holds one model, and a mean needs two or more; name several, or train "
            "with --training.keep-best 5"
        )
    first = checkpoint.load(places[0])
    sums = {name: value.double() for name, value in first.model.state_dict().items()}
    for place in places[1:]:
        other = checkpoint.load(place)
        _check_alike(first, other)
        for name, value in other.model.state_dict().items():
            sums[name] += value
    mean = {name: value / len(places) for name, value in sums.items()}
    with torch.no_grad():
        for name, value in first.model.state_dict().items():
            value.copy_(mean[name])
    names = ", ".join(str(place) for place in places)
    checkpoint.save(
        out,
        first.model,
        files=other_files(first),
        task=first.task,
        origin=f"The mean of {names}.",
    )
    print(f"{out}: the mean of {len(places)} models: {names}")


def other_files(saved: checkpoint.Saved) -> dict[str, Path]:
    """What a model's folder holds beside the model, and beside the state of its training."""
    own = (checkpoint.CONFIG, checkpoint.WEIGHTS, checkpoint.CARD, NUMBERS, TENSORS)
    return {name: path for name, path in saved.files.items() if name not in own}


def _models(folder: Path) -> list[Path]:
    """A run's kept best models, or the one that a folder holds."""
    kept = sorted((folder / BESTS).glob("[0-9]*"))
    return kept if kept else [model_folder(folder)]


def _check_alike(first: checkpoint.Saved, other: checkpoint.Saved) -> None:
    if unlike := differences(to_json(other.model.config), to_json(first.model.config)):
        raise ValueError(
            f"{other.folder} and {first.folder} are models of different shapes: {unlike[0]}; only "
            "models of one shape have a mean"
        )
    if unlike := differences(_meaning(other), _meaning(first)):
        raise ValueError(
            f"{other.folder} and {first.folder} differ in their task: {unlike[0]}; "
            "average models of one run, or of runs fine-tuned from one"
        )
    for name, path in first.files.items():
        if name.startswith("tokenizer") and (
            name not in other.files or other.files[name].read_bytes() != path.read_bytes()
        ):
            raise ValueError(
                f"{other.folder} and {first.folder} have different tokenizers ({name}); average "
                "models of one run, or of runs fine-tuned from one"
            )


def _meaning(saved: checkpoint.Saved) -> dict[str, object]:
    """What the inputs and the outputs of a classifier stand for."""
    task = saved.task or {}
    return {name: task[name] for name in ("labels", "size", "mean", "std") if name in task}
