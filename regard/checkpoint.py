"""A model's folder: its config, its weights, its tokenizer, and a model card.

    config.json         the kind of model and its config, its custom parts, its task, and the size
                        and the sha256 of every other file but the card
    model.safetensors   the weights, each once; its header repeats config.json's words on the model
    tokenizer.json      or whatever files the tokenizer has, as they are
    README.md           the model card

A save is atomic: the new folder is written beside the old one, synced to the disk, and then swapped
with it, so that a crash at any moment, or a full disk, leaves the old folder or the new one.
A load checks every file before it uses any, and nothing in the folder is ever executed: there is no
pickle.
"""

import hashlib
import json
import os
import re
import shlex
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar, cast, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from regard import __version__
from regard.config import Object, differences, dumps, from_json, loads, opened, plain, to_json
from regard.machine import atomic
from regard.machine.device import device as named_device
from regard.synonyms import suggest_names

FORMAT = 1
"""The layout that this version writes, and the newest that it reads."""

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"

TASKS = ("translate", "dates", "classify", "read", "language", "label", "encoder")
"""The tasks whose models `regard.load` returns ready for use."""

Kind = Literal["Transformer", "VisionTransformer", "LanguageModel", "TextClassifier", "TextEncoder"]


@dataclass(frozen=True)
class Saved:
    """The content of a folder."""

    model: nn.Module
    """Filled, on its device, in evaluation mode."""
    config: Any
    """The model's config."""
    task: Object | None
    """The `task` that was passed to `save`."""
    folder: Path
    files: dict[str, Path]
    """Where each file is, by its name; config.json is not among them."""


@suggest_names
def save(
    folder: str | os.PathLike[str],
    model: nn.Module,
    *,
    files: Mapping[str, bytes | str | os.PathLike[str]] | None = None,
    task: Mapping[str, Any] | None = None,
    origin: str | None = None,
) -> None:
    """Writes a model's folder, atomically replacing an older one.

    The folder holds the weights (safetensors), the config with checksums (JSON) and a model card.
    Any module can be saved; its `config`, if that is a dataclass, is saved with it. `files` are the
    tokenizer's and any others, as bytes or as paths to copy from; `task` is JSON with the model's
    purpose, `{"name": "translate", …}`; `origin` is a sentence for the card on where the weights
    come from. Files that no save has written stay in the folder. A folder that no save has written
    is refused.

    `regard.checkpoint.load(folder)` loads the model; `regard.load(folder)` a predictor, if the
    folder names a task.

    >>> from regard import LanguageModel, save
    >>> from regard.checkpoint import load
    >>> save("models/language", LanguageModel.tiny(vocabulary=50))
    >>> load("models/language").model.config.vocabulary
    50
    """
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"save(folder, model) takes a torch.nn.Module, not {type(model).__name__}; of a "
            "predictor save its .model"
        )
    model = unwrapped(model)
    about = _about(model, task)
    tensors = _tensors(model)
    extras = dict(files or {})
    for name in extras:
        _check_name(name, "files")
        if name.casefold() in (CONFIG, WEIGHTS, CARD.casefold()):
            raise ValueError(f'files names "{name}", which is written by save; choose another name')
    # A link stays; its target is replaced.
    target = Path(os.path.realpath(folder))
    with saving(folder):
        target.parent.mkdir(parents=True, exist_ok=True)
        atomic.recover(target)
        _check_target(folder, target, extras.keys())
        atomic.clear(target)
        with atomic.draft(target) as draft:
            # One key: with more, their order would change from save to save.
            save_file(tensors, draft / WEIGHTS, {"regard": json.dumps(about)})
            (draft / WEIGHTS).chmod(0o666 & draft.stat().st_mode)  # readable as the folder is
            for name, content in extras.items():
                if isinstance(content, bytes):
                    (draft / name).write_bytes(content)
                else:
                    shutil.copyfile(content, draft / name)
            card = _card(target.name, model, about, sorted(extras), origin)
            (draft / CARD).write_text(card, encoding="utf-8")
            (draft / CONFIG).write_bytes(dumps(_header(draft, about)))
            for path in draft.iterdir():
                atomic.sync(path)
                atomic.keep_mode(target / path.name, path)
            if target.is_dir():
                if os.listdir(target):
                    atomic.carry(target, draft, _ours(target))
                shutil.copymode(target, draft)
            atomic.sync_folder(draft)
            atomic.replace(draft, target, _ours)


@suggest_names
def load(
    folder: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    verify: bool = True,
    keep_int8: bool = False,
) -> Saved:
    """Loads a model's folder, and refuses one that is damaged or does not fit.

    `model` is a model of a class of your own, or with custom parts. Its parameters are replaced by
    the saved ones: on the `meta` device it takes no memory before. `dtype` is that of
    floating-point tensors; by default they keep the one they were saved in. `verify=False` skips
    the checksums, which read every byte, but not the sizes of files. Weights stored in 8 bits are
    widened unless `keep_int8` is set. A folder that is saved anew meanwhile gives the old model or
    the new one.

    >>> import torch
    >>> from regard import save
    >>> from regard.checkpoint import load
    >>> save("models/linear", torch.nn.Linear(3, 2))
    >>> load("models/linear", model=torch.nn.Linear(3, 2)).model
    Linear(in_features=3, out_features=2, bias=True)
    """
    target = named_device(device)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype ({dtype}) must be a floating one, such as torch.bfloat16")
    return _read_stable(
        folder, lambda place, text: _load(place, text, model, target, dtype, verify, keep_int8)
    )


def check(folder: str | os.PathLike[str]) -> None:
    """Refuses a folder that is damaged, without building its model: any module's will do."""

    def read(place: Path, text: bytes) -> None:
        _read_tensors(place, _read_header(text, str(place / CONFIG)), verify=True)

    _read_stable(folder, read)


Read = TypeVar("Read")
_MAX_READS = 20


def _read_stable(folder: str | os.PathLike[str], read: Callable[[Path, bytes], Read]) -> Read:
    """Reads a folder and its config.json, and again where it was saved anew meanwhile."""
    for _ in range(_MAX_READS):
        place = atomic.standing(Path(folder))
        config = _open_config(place)
        if config is None:
            continue
        fault = None
        # While this file is open, none that comes in its place is taken for it.
        with config:
            try:
                content = read(place, config.read())
            except ValueError as error:
                fault = error
            if _is_current(config, place):
                if fault is not None:
                    raise fault
                return content
    raise ValueError(
        f"{folder} was saved anew each time it was read ({_MAX_READS} times); try later"
    )


# The folder's description of the model


@dataclass(frozen=True)
class _File:
    bytes: int
    sha256: str


@dataclass(frozen=True)
class _Header:
    """config.json."""

    format: int
    regard: str
    kind: str
    model: Object
    task: Object | None
    files: dict[str, _File]
    parts: dict[str, str] | None = None
    """The custom parts; None where they were not compared with those of the config."""


def _header(draft: Path, about: Object) -> Object:
    files = {}
    for path in sorted(draft.iterdir()):
        if path.name != CARD:  # people edit it
            files[path.name] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    return {"format": FORMAT, "regard": __version__, **about, "files": files}


def _read_header(text: bytes, where: str) -> _Header:
    data = loads(text, where)
    if isinstance(data, dict) and data.get("kind") == "run":
        raise ValueError(f"{where} is that of a run; name its model: {Path(where).parent / 'best'}")
    if not isinstance(data, dict) or not {"format", "regard"} <= data.keys():
        raise ValueError(
            f'{where} is not a Regard model\'s: it lacks "format" and "regard"; '
            "other libraries' models come in through `regard import`"
        )
    if type(data["format"]) is int and data["format"] > FORMAT:
        raise ValueError(
            f"{where} has format {data['format']}, written by Regard {data['regard']}, but Regard "
            f"{__version__} reads formats up to {FORMAT}; upgrade regard"
        )
    header = from_json(_Header, data, where)
    if header.format < 1:
        raise ValueError(f"{where}: format ({header.format}) must be 1 or more")
    for name in header.files:
        _check_name(name, f"{where}: files")
    if WEIGHTS not in header.files:
        raise ValueError(f'{where}: files lacks "{WEIGHTS}"; save the model again')
    return header


def _about(model: nn.Module, task: Mapping[str, Any] | None) -> Object:
    """The common part of config.json and of the weights' header."""
    kind = type(model).__name__
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise ValueError(f"{kind} wraps a model; save and load the model itself, {kind}.module")
    parts = custom_parts(model)
    return {
        "kind": kind,
        "model": config_of(model),
        **({} if parts is None else {"parts": parts}),
        "task": None if task is None else plain(dict(task), "save", "task"),
    }


def config_of(model: nn.Module) -> Object:
    """The model's config as a JSON object; empty for a model whose `config` is no dataclass."""
    config = getattr(model, "config", None)
    return to_json(config) if is_dataclass(type(config)) else {}


def custom_parts(model: nn.Module) -> dict[str, str] | None:
    """The model's differences from the one its config builds; None for a class of your own."""
    from regard.model.custom import differing_parts

    standard = standard_model(model)
    return None if standard is None else differing_parts(model, standard)


def standard_model(model: nn.Module) -> nn.Module | None:
    """The model that this one's config builds, without values; None for a class of your own."""
    library = (cls for cls in type(model).__mro__ if cls.__module__.startswith("regard.model."))
    cls: Any = next((cls for cls in library if cls.__name__ in get_args(Kind)), None)
    if cls is None:
        return None
    try:
        with without_values():
            standard: nn.Module = cls(model.config)
    except ValueError:  # the config fits the custom parts alone
        return nn.Module()
    return standard


def listed_parts(parts: Mapping[str, str]) -> str:
    """The first of these parts, and how many more there are."""
    name, text = next(iter(parts.items()))
    more = f" (and {len(parts) - 1} more)" if len(parts) > 1 else ""
    return f"{name or 'the model'} is {text}{more}"


def unlike_parts(have: Mapping[str, str], want: Mapping[str, str]) -> str:
    """The differences of two models' custom parts, in words; empty where they are alike."""
    default = "what its config names"
    unlike = {
        name: f"{have.get(name, default)} instead of {want.get(name, default)}"
        for name in {**have, **want}
        if have.get(name) != want.get(name)
    }
    return listed_parts(unlike) if unlike else ""


def unwrapped(model: nn.Module) -> nn.Module:
    """The model that torch.compile was given."""
    return dict(model.named_children()).get("_orig_mod", model)


def _classes(kind: str, where: str) -> tuple[type[Any], type[Any]]:
    """A kind's model and config; imported here, so that a kind loads without the others."""
    match cast(Kind, kind):
        case "Transformer":
            from regard.model.transformer import Transformer, TransformerConfig

            return Transformer, TransformerConfig
        case "VisionTransformer":
            from regard.model.vit import VisionConfig, VisionTransformer

            return VisionTransformer, VisionConfig
        case "LanguageModel":
            from regard.model.language import LanguageConfig, LanguageModel

            return LanguageModel, LanguageConfig
        case "TextClassifier":
            from regard.model.classifier import ClassifierConfig, TextClassifier

            return TextClassifier, ClassifierConfig
        case "TextEncoder":
            from regard.model.encoder import EncoderConfig, TextEncoder

            return TextEncoder, EncoderConfig
    close = get_close_matches(kind, get_args(Kind), n=1)
    guess = f"; did you mean {close[0]}?" if close else ""
    raise ValueError(
        f'{where}: kind ("{kind}") is not {_either(get_args(Kind))}{guess}; for a class of your '
        f"own pass a model of it: regard.checkpoint.load(folder, model={kind}(…)).model"
    )


def _either(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _check_name(name: str, where: str) -> None:
    """A file lies in the folder itself: no name leads out of it, on any system."""
    if not name or name.startswith(".") or re.search(r'[/\\:\0-\x1f"*?<>|]', name):
        raise ValueError(
            f"{where} names {json.dumps(name)}, which must be a file's plain name, such as "
            '"tokenizer.json": without folders, not hidden'
        )


# Weights


def _state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, themselves."""
    state = dict(model.state_dict(keep_vars=True))
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
            raise ValueError(f"{name} must be a dense tensor; only those are saved and loaded")
    return state


def _ties(state: Mapping[str, Tensor]) -> list[list[str]]:
    """The names of each tensor: several where parts of a model share it."""
    groups: dict[object, list[str]] = {}
    for name, tensor in state.items():
        # The storage itself rather than its address, which is 0 on `meta` and where it is empty.
        storage = tensor.untyped_storage()._cdata
        view = (storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        groups.setdefault(view, []).append(name)
    return list(groups.values())


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """The tensors to store: each once, under its first name."""
    state = _state(model)
    if empty := [name for name, tensor in state.items() if tensor.is_meta]:
        raise ValueError(f"{', '.join(empty)} on the meta device have no values to save; fill them")
    tensors, storages = {}, set()
    for names in _ties(state):
        tensor = state[names[0]].detach().cpu().contiguous()
        # Other views of a storage are stored for themselves: the format has no sharing.
        storage = tensor.untyped_storage()._cdata
        tensors[names[0]] = tensor.clone() if storage in storages else tensor
        storages.add(storage)
    return tensors


def _load(
    place: Path,
    text: bytes,
    model: nn.Module | None,
    device: torch.device,
    dtype: torch.dtype | None,
    verify: bool,
    keep_int8: bool,
) -> Saved:
    where = str(place / CONFIG)
    header = _read_header(text, where)
    if model is None:
        cls, config_class = _classes(header.kind, where)
        config = from_json(config_class, header.model, where, "model")
        if header.parts:
            raise ValueError(
                f"{place} was saved with parts that its config does not name: "
                f"{listed_parts(header.parts)}; pass a model that has them: load(folder, model=…)"
            )
    else:
        have, config = _about(unwrapped(model), None), getattr(unwrapped(model), "config", None)
        known = header.model
        if is_dataclass(type(config)):
            config = from_json(type(config), header.model, where, "model")
            known = to_json(config)
        if unlike := differences(have["model"], known, "model"):
            raise ValueError(
                f"the model given is not the one saved in {place}: {'; '.join(unlike)}; "
                "build it with the saved config"
            )
        if header.parts is not None and (
            other := unlike_parts(have.get("parts", {}), header.parts)
        ):
            raise ValueError(
                f"the model given is not the one saved in {place}: {other}; build it with the "
                "saved parts"
            )
    stored = _read_tensors(place, header, verify)
    if model is None:
        with unfilled(config, stored, where), _Unfilled():
            model = cls(config)
    if any(tensor.dtype == torch.int8 for tensor in stored.values()):
        stored = _fit_int8(unwrapped(model), stored, keep_int8)
    _fill(unwrapped(model), place / WEIGHTS, stored, device, dtype)
    return Saved(
        model.eval(), config, header.task, place, {name: place / name for name in header.files}
    )


def _read_tensors(place: Path, header: _Header, verify: bool) -> dict[str, Tensor]:
    """The tensors of a folder, once its files agree with its config.json."""
    _check_files(place, header.files, verify)
    metadata, stored = _map_tensors(place / WEIGHTS)
    _check_about(place / WEIGHTS, header, metadata)
    return stored


@contextmanager
def without_values() -> Iterator[None]:
    """Models that are built inside have shapes but no values, and take neither memory nor time."""
    with torch.device("meta"), _Unfilled():
        yield


def _fit_int8(model: nn.Module, stored: dict[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """Has the model fit tensors some of which are of 8 bits, or the tensors the model."""
    from regard.model.quantized import float_weights, make_room

    if not keep:
        return float_weights(stored, _ties(_state(model)))
    with torch.device("meta"):
        make_room(model, stored)
    return stored


@contextmanager
def unfilled(config: object, stored: Mapping[str, Tensor], where: object) -> Iterator[None]:
    """A model of this config can be built inside, without memory, to be filled with these tensors.

    A config that needs far more of them is refused.
    """
    for name in ("layers", "encoder_layers", "decoder_layers"):
        # Of each there are several tensors. To build a billion takes hours, even on meta.
        if getattr(config, name, 0) > len(stored):
            raise ValueError(
                f"{where}: {name} ({getattr(config, name)}) is more than there are tensors in the "
                f"weights ({len(stored)}); restore it"
            )
    try:
        with torch.device("meta"):
            yield
    except (RuntimeError, OverflowError, TypeError) as error:
        if isinstance(error, TypeError) and "Overflow" not in str(error):
            raise
        reason = str(error).splitlines()[0]
        raise ValueError(f"{where} asks for tensors that cannot be ({reason})") from error


class _Unfilled(TorchFunctionMode):
    """Leaves out random initial values, for which `meta` alone imports a second's worth of code."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _RANDOM:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


# Those of nn.init that torch hands over whole; the others come down to the first two.
_RANDOM = (
    Tensor.normal_,
    Tensor.uniform_,
    nn.init.normal_,
    nn.init.uniform_,
    nn.init.kaiming_uniform_,
)


def _map_tensors(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The weights' header, and the tensors as views of the mapped file, which take no memory."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return file.metadata() or {}, tensors
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def _fill(
    model: nn.Module,
    path: Path,
    stored: Mapping[str, Tensor],
    device: torch.device,
    dtype: torch.dtype | None,
) -> None:
    state = _state(model)
    ties = _ties(state)
    _check_fit(path, type(model).__name__, state, ties, stored)
    filled: dict[str, Tensor] = {}
    for names in ties:
        old, new = state[names[0]], next(stored[name] for name in names if name in stored)
        value = new.to(device, dtype if new.is_floating_point() else None, copy=True)
        if isinstance(old, nn.Parameter):
            # One parameter for all its names: ties stay.
            value = nn.Parameter(value, requires_grad=old.requires_grad)
        filled.update(dict.fromkeys(names, value))
    model.load_state_dict(filled, assign=True)
    if empty := [name for name, buffer in model.named_buffers() if buffer.is_meta]:
        raise ValueError(
            f"{', '.join(empty)} are not among the saved buffers, and have no values on meta; "
            "register them as persistent, or build the model on a real device"
        )
    model.to(device)


def _check_about(path: Path, header: _Header, metadata: Mapping[str, str]) -> None:
    """config.json has no checksum of its own; the weights' header shows if it has changed."""
    if "regard" not in metadata:
        return
    have: Object = {"kind": header.kind, "model": header.model, "task": header.task}
    saved: Any = loads(metadata["regard"].encode(), f"{path}'s header")
    if "parts" in saved:
        have["parts"] = header.parts
    if changed := differences(have, saved):
        raise ValueError(
            f"{path.with_name(CONFIG)} has changed since it was saved: {'; '.join(changed)}; "
            "restore it, or change a model in Python and save it again"
        )


def _check_fit(
    path: Path,
    kind: str,
    state: Mapping[str, Tensor],
    ties: list[list[str]],
    stored: Mapping[str, Tensor],
) -> None:
    """Every tensor has its value, of its shape and kind of number, and no value is left over."""
    expected = {next((name for name in names if name in stored), names[0]) for names in ties}
    misshapen, mistyped = [], []
    for name in expected & stored.keys():
        have, want = stored[name], state[name]
        if have.shape != want.shape:
            misshapen.append(f"{name} {tuple(have.shape)} instead of {tuple(want.shape)}")
        # A model may be saved in another precision than it is built in.
        floating = have.is_floating_point() and want.is_floating_point()
        if have.dtype != want.dtype and not floating:
            mistyped.append(f"{name} {have.dtype} instead of {want.dtype}")
    faults = {
        "missing": expected - stored.keys(),
        "unexpected": stored.keys() - expected,
        "of another shape": misshapen,
        "of another type": mistyped,
    }
    if any(faults.values()):
        texts = (f"{fault}: {', '.join(sorted(which))}" for fault, which in faults.items() if which)
        raise ValueError(
            f"{path} does not fit this {kind}; {'; '.join(texts)}; "
            "if it was saved with custom parts, pass a model that has them: load(folder, model=…)"
        )


# Files


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_files(place: Path, files: Mapping[str, _File], verify: bool) -> None:
    faults = [
        f"{name} {fault}"
        for name, file in files.items()
        if (fault := _damage(place / name, file, verify))
    ]
    if faults:
        raise ValueError(
            f"{place} is damaged: {'; '.join(faults)}; restore what was saved, or take a file "
            f"changed on purpose out of {CONFIG}'s files"
        )


def _damage(path: Path, file: _File, verify: bool) -> str | None:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            return "is not a file"
        if status.st_size != file.bytes:
            return f"has {status.st_size} bytes instead of {file.bytes}"
        if verify and (sha256 := _sha256(path)) != file.sha256:
            return (
                f"has other bytes than were saved (sha256 {sha256[:12]}…, not {file.sha256[:12]}…)"
            )
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None


def _open_config(place: Path) -> BinaryIO | None:
    """A folder's config.json; None where the folder was replaced at this very moment."""
    path = place / CONFIG
    try:
        return opened(path)
    except FileNotFoundError:
        if path.exists() or not place.exists():
            return None
        raise ValueError(f"{place} has no {CONFIG}: it is not a folder that save wrote") from None


def _is_current(config: BinaryIO, place: Path) -> bool:
    """True if a folder still has the config that was opened; every save brings a new one."""
    try:
        return os.path.samestat(os.fstat(config.fileno()), (place / CONFIG).stat())
    except OSError:
        return False


# Replacing a folder


@contextmanager
def saving(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Errors of the operating system while a folder is written, in one line."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = str(error)
        if isinstance(error, OSError) and error.strerror:
            reason = error.strerror + (f" ({error.filename})" if error.filename else "")
        raise ValueError(
            f"{os.fspath(folder)} was not saved, and holds what it held: {reason}"
        ) from error


def _check_target(folder: str | os.PathLike[str], target: Path, extras: Set[str]) -> None:
    """Refuse to replace what no save has written."""
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise ValueError(f"{folder} is not a folder; choose another name")
    here = Path.cwd()
    if target == here or target in here.parents:
        raise ValueError(
            f"{folder} holds the working directory, which would be replaced under your feet; "
            f"run from {target.parent}"
        )
    present = set(os.listdir(target))
    if not present:
        return
    try:
        ours = _ours(target)
    except (OSError, ValueError) as error:
        reason = "it has no config.json" if isinstance(error, OSError) else str(error)
        raise ValueError(
            f"{folder} holds files but not a Regard model ({reason}); choose another folder, or "
            "empty it first"
        ) from None
    if foreign := sorted((present - ours) & extras):
        raise ValueError(
            f"{folder} already holds {', '.join(foreign)}, which no save has put there; rename it"
        )


def _ours(folder: Path) -> set[str]:
    """The names that a save has put into a folder."""
    path = folder / CONFIG
    with opened(path) as file:
        return {CONFIG, CARD, *_read_header(file.read(), str(path)).files}


# The model card


def _card(name: str, model: nn.Module, about: Object, extras: list[str], origin: str | None) -> str:
    state = _state(model)
    firsts = [state[names[0]] for names in _ties(state)]
    parameters = sum(tensor.numel() for tensor in firsts if isinstance(tensor, nn.Parameter))
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in firsts})
    standard = about["kind"] in get_args(Kind) and not about.get("parts")
    argument = "" if standard else ", model=…"
    task = about["task"] or {}
    ready = task.get("name") in TASKS
    beside = f"; beside it {', '.join(extras)}" if extras else ""
    lines = [
        f"# {name}",
        "",
        f"A {about['kind']}, saved by Regard {__version__}.",
        "",
        "| | |",
        "|---|---|",
        f"| parameters | {parameters:,} |",
        f"| weights | `{WEIGHTS}` ({', '.join(dtypes) or 'none'}){beside} |",
        *(f"| {key} | {_cell(value)} |" for key, value in about["model"].items()),
        "",
        "## Use",
        "",
        "```python",
        "import regard" if ready else "from regard.checkpoint import load",
        "",
        f"{'predictor = regard.' if ready else 'model = '}load({name!r}{argument})"
        + ("" if ready else ".model"),
        "```",
    ]
    if example := task.get("example"):
        lines += ["", "```sh", str(example).replace("{run}", shlex.quote(name)), "```"]
    if origin:
        lines += ["", "## Where the weights come from", "", origin.strip()]
    return "\n".join(lines) + "\n"


def _cell(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text.strip('"').replace("|", "\\|")
