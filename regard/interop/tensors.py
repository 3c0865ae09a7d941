"""Tensors as other libraries keep them: read from files, renamed, checked and written.

A format lists `Pair`s: a name of theirs, and the names of ours that hold the same numbers. The list
serves both ways, and says what is missing, unexpected or of another shape, all of it at once.

Nothing is unpickled: `.bin` files go through torch's loader of weights alone.
"""

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import reduce
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from regard.checkpoint import saving
from regard.config import opened
from regard.machine import atomic

Tensors: TypeAlias = dict[str, Tensor]

# In the order of preference: a folder that has both kinds holds the same numbers twice.
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_PICKLED = (".bin", ".pt", ".pth")


def _alone(tensor: Tensor) -> Sequence[Tensor]:
    return (tensor,)


def _only(tensors: Sequence[Tensor]) -> Tensor:
    (tensor,) = tensors
    return tensor


@dataclass(frozen=True)
class Pair:
    """A tensor of theirs and the tensors of ours that hold the same numbers.

    Pair("fc1.weight", "feed_forward.expand.weight")
    Pair("qkv.bias", ("query.bias", "key.bias", "value.bias"), lambda t: t.chunk(3), torch.cat)
    """

    theirs: str
    ours: str | tuple[str, ...]
    split: Callable[[Tensor], Sequence[Tensor]] = _alone
    """From theirs to ours; `join` goes back, and tells which shape theirs must have."""
    join: Callable[[Sequence[Tensor]], Tensor] = _only
    again: tuple[str, ...] = ()
    """Names under which some files hold the same tensor once more, or instead; never written."""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.ours,) if isinstance(self.ours, str) else self.ours


# Reading


def settings(source: Path, name: str = "config.json") -> dict[str, Any]:
    """What a JSON file says that lies in the folder, or beside the file."""
    if not source.exists():
        raise ValueError(f"{source} does not exist; name a folder or a file")
    path = (source if source.is_dir() else source.parent) / name
    try:
        text = opened(path)
    except FileNotFoundError:
        where = f"{path.parent.resolve()} has no {name}, which says what the model is; add it"
        raise ValueError(where) from None
    try:
        with text:
            said = json.load(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}); fetch it again") from None
    if not isinstance(said, dict):
        raise ValueError(f"{path} must hold a JSON object, not a {type(said).__name__}")
    return said


def load(source: Path) -> Tensors:
    """All tensors of a file, or of a folder with one file or with shards and their index."""
    if source.is_file():
        return _load_file(source)
    for name in _WEIGHTS:
        if (source / name).is_file():
            return _load_file(source / name)
        if (source / f"{name}.index.json").is_file():
            return _load_shards(source, f"{name}.index.json")
    raise ValueError(f"{source} has no weights; it needs {' or '.join(_WEIGHTS)}, or their shards")


def _load_shards(folder: Path, index: str) -> Tensors:
    places = settings(folder, index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ValueError(f"{folder / index} must have a weight_map of tensors to files")
    files = sorted(set(map(str, places.values())))
    outside = [name for name in files if Path(name).name != name]
    if outside:
        raise ValueError(f"{folder / index} names files outside the folder: {', '.join(outside)}")
    absent = [name for name in files if not (folder / name).is_file()]
    if absent:
        raise ValueError(f"{folder} lacks shards: {', '.join(absent)}; fetch them")
    tensors: Tensors = {}
    for name in files:
        tensors |= _load_file(folder / name)
    problems = _listed(
        missing=[name for name in places if name not in tensors],
        unexpected=[name for name in tensors if name not in places],
    )
    if problems:
        raise ValueError(f"{folder / index} and its shards disagree: {problems}; fetch them again")
    return tensors


def _load_file(path: Path) -> Tensors:
    if path.suffix == ".safetensors":
        try:
            return dict(load_file(path))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is damaged ({error}); fetch it again") from None
    if path.suffix not in _PICKLED:
        known = ", ".join((".safetensors", *_PICKLED))
        raise ValueError(f"{path} holds no weights that can be read; known are {known}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # remarks on odd pickles, which are refused anyway
            held = torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError:
        raise ValueError(
            f"{path} holds more than weights, or is damaged, and is not opened; "
            "convert it to safetensors where you trust it"
        ) from None
    except (RuntimeError, EOFError, OSError) as error:
        raise ValueError(f"{path} is damaged ({_line(error)}); fetch it again") from None
    for name in ("state_dict", "model"):  # training scripts put the weights among other things
        if isinstance(held, dict) and isinstance(held.get(name), dict):
            held = held[name]
    if not isinstance(held, dict) or not all(isinstance(value, Tensor) for value in held.values()):
        raise ValueError(f"{path} must hold tensors by name, and nothing else")
    return {str(name): value for name, value in held.items()}


def size(tensors: Mapping[str, Tensor], *places: tuple[str, int]) -> int:
    """How long an axis is, by the first tensor there is; a `*` in its name stands for anything."""
    for pattern, axis in places:
        for name, tensor in tensors.items():
            if fnmatchcase(name, pattern) and -tensor.ndim <= axis < tensor.ndim:
                return tensor.shape[axis]
    names = " or ".join(pattern for pattern, _ in places)
    raise ValueError(f"there is no {names} among the tensors, which tells a size that is needed")


def fill(
    model: nn.Module, tensors: Mapping[str, Tensor], pairs: Iterable[Pair], source: Path | str
) -> None:
    """Gives a model, which may be on the meta device, all its values; ties are kept.

    The numbers are copied as they are stored; where precisions differ the model takes the finest.
    """
    ours = model.state_dict()
    dtypes = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    dtype = reduce(torch.promote_types, dtypes) if dtypes else torch.float32

    values: Tensors = {}
    missing, misshapen, differing, used = [], [], [], set[str]()
    for pair in pairs:
        there = [name for name in (pair.theirs, *pair.again) if name in tensors]
        used.update(there)
        if not there:
            missing.append(pair.theirs)
            continue
        want = pair.join([ours[name].to("meta") for name in pair.names]).shape
        wrong = [name for name in there if tensors[name].shape != want]
        if wrong:
            misshapen += [f"{n} {tuple(tensors[n].shape)} for {tuple(want)}" for n in wrong]
            continue
        first = tensors[there[0]]
        differing += [f"{n} from {there[0]}" for n in there[1:] if not tensors[n].equal(first)]
        for name, part in zip(pair.names, pair.split(first)):
            # A copy: parts of one tensor must not share its memory, nor anything the file's.
            values[name] = part.to(dtype).clone(memory_format=torch.contiguous_format)
    problems = _listed(
        missing=missing,
        unexpected=[name for name in tensors if name not in used],
        misshapen=misshapen,
        integer=[name for name in used if not tensors[name].is_floating_point()],
        differing=differing,
    )
    if problems:
        raise ValueError(f"{source} does not fit its config: {problems}")
    _assign(model, values)


def _assign(model: nn.Module, values: Tensors) -> None:
    """Puts tensors in the place of the model's own; what was one parameter stays one."""
    first: dict[int, str] = {}
    ties: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        ties[name] = first.setdefault(id(parameter), name)
    given = {ties[name]: value for name, value in values.items() if name in ties}
    values = values | {name: given[root] for name, root in ties.items() if root in given}
    model.load_state_dict(values, assign=True)
    for name, root in ties.items():
        home, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(home), leaf, model.get_parameter(root))


# Writing


def give(model: nn.Module, pairs: Iterable[Pair]) -> Tensors:
    """The model's values under their names."""
    ours = model.state_dict()
    return {
        pair.theirs: pair.join([ours[name] for name in pair.names]).detach().cpu().contiguous()
        for pair in pairs
    }


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Where to write a new folder, which gets its name if the block succeeds, or vanishes."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not an empty folder; name a new one")
    with saving(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        atomic.clear(folder)
        with atomic.draft(folder) as draft:
            yield draft
            for path in draft.iterdir():
                atomic.sync(path)
            atomic.replace(draft, folder, lambda old: set())


def store(
    folder: Path,
    tensors: Mapping[str, Tensor],
    said: Mapping[str, Mapping[str, Any]],
    files: Mapping[str, bytes | Path] | None = None,
) -> None:
    """Writes model.safetensors, JSON files and others as they are.

    Each tensor is stored with memory of its own.
    """
    save_file(
        {name: tensor.clone() for name, tensor in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    for name, content in said.items():
        write_json(folder / name, content)
    put(folder, files or {})


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")


def put(folder: Path, files: Mapping[str, bytes | Path]) -> None:
    """Files as they are."""
    for name, held in files.items():
        (folder / name).write_bytes(held if isinstance(held, bytes) else held.read_bytes())


def _listed(**problems: Sequence[str]) -> str:
    return "; ".join(f"{what} {', '.join(names)}" for what, names in problems.items() if names)


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
