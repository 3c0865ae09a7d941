"""A model's folder: what is saved comes back, whole or not at all, and every damage is named."""

import errno
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import regard
from regard import checkpoint
from regard.checkpoint import CONFIG, WEIGHTS, load, save
from regard.machine import atomic
from regard.model.language import LanguageConfig, LanguageModel
from regard.model.transformer import ImageSource, Transformer, TransformerConfig
from regard.model.vit import VisionConfig, VisionTransformer
from regard.task.label import Labeler
from tests.service import samples

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class PlainConfig:
    width: int = 5
    classes: int = 7
    tied: bool = True


class Plain(nn.Module):
    """The least that is saved: a table, tied or not, and a buffer of whole numbers."""

    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        self.config = config
        self.table = nn.Embedding(config.classes, config.width)
        self.mix = nn.Linear(config.width, config.width)
        self.output = nn.Linear(config.width, config.classes, bias=False)
        self.register_buffer("steps", torch.tensor([2, 3]))
        if config.tied:
            self.output.weight = self.table.weight


@pytest.fixture(autouse=True)
def _plain_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    known = checkpoint._classes

    def classes(kind: str, where: str) -> tuple[type[Any], type[Any]]:
        return (Plain, PlainConfig) if kind == "Plain" else known(kind, where)

    monkeypatch.setattr(checkpoint, "_classes", classes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "plain"


@pytest.fixture(params=["swap", "two renames"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways for a folder to take another's place."""
    if request.param == "two renames":
        monkeypatch.setattr(atomic, "_swap", lambda one, other: False)
    return str(request.param)


def plain(value: float | None = None, **config: Any) -> Plain:
    model = Plain(PlainConfig(**config))
    if value is not None:
        for tensor in model.state_dict().values():
            tensor.fill_(value)
    return model


def stamped(folder: Path, value: int) -> None:
    """A save all of whose parts say the same number."""
    save(folder, plain(value), files={"stamp": f"{value}".encode()}, task={"stamp": value})


def stamp(saved: checkpoint.Saved) -> int:
    """The one number that all parts of what was loaded say."""
    said = {
        int(number) for tensor in saved.model.state_dict().values() for number in tensor.ravel()
    }
    assert saved.task is not None
    assert said == {saved.task["stamp"]}
    return said.pop()


def same(one: nn.Module, other: nn.Module) -> None:
    have, want = one.state_dict(), other.state_dict()
    assert have.keys() == want.keys()
    for name, tensor in want.items():
        assert have[name].dtype == tensor.dtype
        assert torch.equal(have[name], tensor), name


def held(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# Round trips


def small_models() -> list[nn.Module]:
    sizes: dict[str, Any] = {"width": 12, "heads": 2, "feed_forward": 17}
    return [
        Transformer(TransformerConfig(11, **sizes, encoder_layers=1, decoder_layers=2)),
        Transformer(
            TransformerConfig(
                11,
                **sizes,
                encoder_layers=1,
                decoder_layers=1,
                source=ImageSource(image=(6, 4), patch=2),
                position="rotary",
                norm="pre",
            )
        ),
        VisionTransformer(VisionConfig(5, **sizes, layers=2, image=6, patch=3)),
        LanguageModel(LanguageConfig(13, **sizes, layers=2)),
    ]


@pytest.mark.parametrize("model", small_models(), ids=lambda model: type(model).__name__)
def test_every_kind_comes_back(model: nn.Module, folder: Path) -> None:
    save(folder, model)
    saved = load(folder)
    assert type(saved.model) is type(model)
    assert saved.config == saved.model.config == model.config
    assert not saved.model.training
    assert model.training
    same(saved.model, model)
    want = [(name, p.requires_grad) for name, p in model.named_parameters()]
    assert [(name, p.requires_grad) for name, p in saved.model.named_parameters()] == want


def test_the_folder(folder: Path) -> None:
    tokenizer = folder.parent / "mine.json"
    folder.parent.mkdir()
    tokenizer.write_bytes(b'{"a": 1}')
    files = {"tokenizer.json": tokenizer, "source.spm": b"\x00\xff"}
    save(folder, plain(), files=files, task={"name": "translate", "from": ("de", "ü")})
    assert set(held(folder)) == {CONFIG, WEIGHTS, "README.md", "source.spm", "tokenizer.json"}
    data = json.loads((folder / CONFIG).read_text())
    assert list(data) == ["format", "regard", "kind", "model", "task", "files"]
    assert data["regard"] == regard.__version__
    assert data["kind"] == "Plain"
    assert data["model"] == {"width": 5, "classes": 7, "tied": True}
    assert data["files"].keys() == set(held(folder)) - {CONFIG, "README.md"}
    (folder / "README.md").write_text("The card is for people, who may write in it.")
    saved = load(folder)
    assert saved.task == {"name": "translate", "from": ["de", "ü"]}
    assert saved.folder == folder
    assert saved.files.keys() == data["files"].keys()
    assert saved.files["source.spm"].read_bytes() == b"\x00\xff"
    assert saved.files["tokenizer.json"].read_bytes() == b'{"a": 1}'
    assert held(folder.parent) == ["mine.json", "plain"]


def test_the_same_model_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one/run", "two/run"):
        save(tmp_path / name, plain(3.0))
    for name in held(tmp_path / "one/run"):
        one, two = (tmp_path / root / "run" / name for root in ("one", "two"))
        assert one.read_bytes() == two.read_bytes()


def test_others_read_the_weights(folder: Path) -> None:
    model = plain()
    save(folder, model)
    stored = load_file(folder / WEIGHTS)
    assert set(stored) == {"table.weight", "mix.weight", "mix.bias", "steps"}
    assert torch.equal(stored["mix.weight"], model.mix.weight)
    with safe_open(folder / WEIGHTS, "pt") as file:
        assert json.loads(file.metadata()["regard"])["kind"] == "Plain"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_a_dtype_is_kept_or_changed(dtype: torch.dtype, folder: Path) -> None:
    model = plain().to(dtype)
    save(folder, model)
    same(load(folder).model, model)
    changed = load(folder, dtype=torch.float32).model
    assert changed.mix.weight.dtype == torch.float32
    assert changed.steps.dtype == torch.int64
    assert torch.equal(changed.mix.weight, model.mix.weight.float())


def test_ties_stay_ties(folder: Path) -> None:
    save(folder, plain())
    model = load(folder, dtype=torch.bfloat16).model
    assert model.output.weight is model.table.weight
    save(folder, plain(tied=False))
    model = load(folder).model
    assert model.output.weight is not model.table.weight
    # Two parameters over one memory are tied as well.
    model.output.weight = nn.Parameter(model.table.weight.data)
    save(folder, model)
    assert "output.weight" not in load_file(folder / WEIGHTS)


def test_a_tie_is_found_under_any_of_its_names(folder: Path) -> None:
    model = plain()
    save(folder, model)
    stored = load_file(folder / WEIGHTS)
    stored["output.weight"] = stored.pop("table.weight")
    rewrite_weights(folder, stored)
    same(load(folder).model, model)


def test_any_layout_of_memory_is_saved(folder: Path) -> None:
    model = plain(tied=False)
    whole = torch.randn(2, 5, 5)
    model.mix.weight = nn.Parameter(whole[1].t())
    assert not model.mix.weight.is_contiguous()
    # Views of one storage that are not one tensor: a part of it, and all of it in another shape.
    flat = torch.randn(35)
    model.table.weight = nn.Parameter(flat.view(7, 5))
    model.output.weight = nn.Parameter(flat.view(5, 7).t())
    model.mix.bias = nn.Parameter(flat[:5])
    save(folder, model)
    same(load(folder).model, model)


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_empty_tensors(folder: Path) -> None:
    model = plain(tied=False, classes=0)
    save(folder, model)
    same(load(folder).model, model)


@pytest.mark.slow
def test_a_compiled_model_is_saved_as_itself(folder: Path) -> None:
    model = plain()
    save(folder, torch.compile(model, backend="eager"))
    same(load(folder).model, model)


def test_weights_are_memory_of_their_own(folder: Path) -> None:
    save(folder, plain(2.0))
    model = load(folder).model
    with (folder / WEIGHTS).open("r+b") as file:
        file.truncate(0)
    assert torch.equal(model.mix.weight, torch.full((5, 5), 2.0))


@pytest.mark.gpu
def test_a_device(folder: Path) -> None:
    model = plain().cuda()
    save(folder, model)
    back = load(folder, device="cuda", dtype=torch.bfloat16).model
    assert back.output.weight is back.table.weight
    assert all(tensor.is_cuda for tensor in back.state_dict().values())
    same(load(folder).model, model.cpu())


def test_a_vision_transformer_loads_without_the_others(folder: Path) -> None:
    save(folder, small_models()[2])
    code = f"""
import sys
import torch
from regard.attention.attend import attend
from regard.attention.mask import causal, padding
from regard.checkpoint import load
load({str(folder)!r})
attend(torch.ones(2, 1, 3, 4), *[torch.ones(2, 1, 5, 4)] * 2, mask=padding([5, 2]))
attend(torch.ones(3, 4), *[torch.ones(2, 1, 5, 4)] * 2, mask=causal())
print(*(name for name in sys.modules if name.startswith("regard.model.") or name == "sympy"))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    imported = set(done.stdout.split())
    assert "regard.model.vit" in imported, done.stderr
    # Torch's own ways to fill meta tensors and to broadcast shapes would take sympy, and a second.
    assert not imported & {"regard.model.language", "regard.model.transformer", "sympy"}


def test_no_pickle() -> None:
    source = Path(checkpoint.__file__).read_text()
    assert "torch.load" not in source
    assert "torch.save" not in source


# A model with parts of one's own


class Own(Plain):
    """Has a part that the config does not know."""

    def __init__(self, config: PlainConfig) -> None:
        super().__init__(config)
        self.part = nn.Linear(config.width, 3)
        self.register_buffer("passing", torch.arange(4.0), persistent=False)


def test_a_module_without_a_config_is_saved_and_filled(folder: Path) -> None:
    model, other = nn.Linear(3, 5), nn.Linear(3, 5)
    save(folder, model)
    with pytest.raises(ValueError, match=r"load\(folder, model=Linear\(…\)\).model\Z"):
        load(folder)
    assert load(folder, model=other).model is other
    same(other, model)
    with pytest.raises(ValueError, match=r"weight \(5, 3\) instead of \(5, 2\)"):
        load(folder, model=nn.Linear(2, 5))


@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_a_model_of_ones_own_is_filled(where: str, folder: Path) -> None:
    own = Own(PlainConfig())
    save(folder, own)
    with pytest.raises(
        ValueError, match=r'kind \("Own"\) is not Transformer, .*model=Own\(…\)\).model'
    ):
        load(folder)
    with torch.device(where):
        other = Own(PlainConfig())
    other.passing = torch.arange(4.0)
    saved = load(folder, model=other)
    assert saved.model is other
    assert other.output.weight is other.table.weight
    same(other, own)
    assert torch.equal(other.passing, torch.arange(4.0))


def test_what_meta_cannot_know_is_refused(folder: Path) -> None:
    save(folder, Own(PlainConfig()))
    with torch.device("meta"):
        own = Own(PlainConfig())
    with pytest.raises(ValueError, match="passing are not among the saved buffers"):
        load(folder, model=own)


def test_a_model_that_is_not_the_saved_one(folder: Path) -> None:
    save(folder, plain())
    with pytest.raises(ValueError, match=re.escape("model.width is 11 instead of 5; model.tied")):
        load(folder, model=plain(width=11, tied=False))
    with pytest.raises(ValueError, match=r"not the one saved in .*: model.width is absent instead"):
        load(folder, model=nn.Linear(2, 3))


# What is refused


def refused(folder: Path, said: str, **options: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as fault:
        load(folder, **options)
    assert "\n" not in str(fault.value)


def rewrite(folder: Path, change: Callable[[Any], object]) -> None:
    """Changes config.json."""
    data = json.loads((folder / CONFIG).read_text())
    change(data)
    (folder / CONFIG).write_text(json.dumps(data))


def rewrite_weights(folder: Path, tensors: dict[str, Tensor], **metadata: str) -> None:
    """Changes the weights, checksum and all."""
    path = folder / WEIGHTS
    save_file(tensors, path, metadata)
    entry = {"bytes": path.stat().st_size, "sha256": checkpoint._sha256(path)}
    rewrite(folder, lambda data: data["files"].update({WEIGHTS: entry}))


def test_folders_that_are_none(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere" / "at all", "does not exist; name the folder")
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", "file is not a folder")
    refused(tmp_path, "has no config.json: it is not a folder that save wrote")
    (tmp_path / CONFIG).mkdir()
    refused(tmp_path, "config.json is a folder")


def test_a_config_that_never_ends_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / CONFIG
    path.symlink_to("/dev/zero")
    refused(tmp_path, "config.json is no ordinary file")
    path.unlink()
    os.mkfifo(path)
    refused(tmp_path, "config.json is no ordinary file")
    path.unlink()
    with path.open("wb") as file:
        file.truncate(10**10)
    refused(tmp_path, "config.json has 10,000,000,000 bytes")
    path.write_text("[" * 10**6)
    refused(tmp_path, "config.json is not JSON that can be read: it is nested too deeply")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layers": 10**9}, "layers (1000000000) is more than there are tensors in the weights"),
        ({"vocabulary": 10**12}, "does not fit this LanguageModel"),
        ({"width": 2**62}, "asks for tensors that cannot be"),
        ({"feed_forward": 2**62}, "asks for tensors that cannot be"),
        ({"heads": 10**15}, "heads (1000000000000000) must divide width"),
        ({"heads": 0}, "heads (0) must be a whole number"),
    ],
)
def test_a_config_that_asks_for_the_moon(change: dict[str, int], said: str, folder: Path) -> None:
    """Even where the weights' header, and all checksums, ask for the same."""
    save(folder, LanguageModel(LanguageConfig(13, width=8, heads=2, layers=1, feed_forward=6)))
    rewrite(folder, lambda data: data["model"].update(change))
    about = json.loads((folder / CONFIG).read_text())
    about = {name: about[name] for name in ("kind", "model", "task")}
    rewrite_weights(folder, load_file(folder / WEIGHTS), regard=json.dumps(about))
    refused(folder, said)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "config.json is not JSON that can be read: Expecting value"),
        ('{"format": 1,', "config.json is not JSON that can be read"),
        ("[]", "config.json is not a Regard model's"),
        ('{"model_type": "marian"}', "come in through `regard import`"),
    ],
)
def test_a_config_that_is_none(text: str, said: str, folder: Path) -> None:
    save(folder, plain())
    (folder / CONFIG).write_text(text)
    refused(folder, said)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda data: data.update(format=2, new=3, regard="9.1"),
            f"format 2, written by Regard 9.1, but Regard {regard.__version__} reads formats up to "
            "1; upgrade regard",
        ),
        (lambda data: data.update(format=0), "format (0) must be 1 or more"),
        (lambda data: data.update(format="1"), 'config.json: format ("1") must be an int'),
        (lambda data: data.update(kind="Trasformer"), "did you mean Transformer?"),
        (
            lambda data: data.update(kind="BERT"),
            "LanguageModel, TextClassifier or TextEncoder",
        ),
        (lambda data: data.update(exec=1), 'config.json has the unknown key "exec"'),
        (lambda data: data.pop("files"), 'config.json lacks "files"'),
        (lambda data: data["model"].update(with_=4), 'model has the unknown key "with_"; did'),
        (lambda data: data["model"].update(width="5"), 'model.width ("5") must be an int'),
        (lambda data: data["model"].update(width=-5), "model.width is -5 instead of 5"),
        (lambda data: data["model"].update(classes=11), "model.classes is 11 instead of 7"),
        (lambda data: data.update(task={"a": 1}), "changed since it was saved: task is"),
        (lambda data: data["files"].pop(WEIGHTS), 'files lacks "model.safetensors"'),
        (lambda data: data["files"].update(b={"bytes": 1}), 'files.b lacks "sha256"'),
        (lambda data: data["files"].update(b={"bytes": 1, "sha256": ""}), "b is missing"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_a_config_that_is_wrong(change: Callable[[Any], object], said: str, folder: Path) -> None:
    save(folder, plain())
    rewrite(folder, change)
    refused(folder, said)


ESCAPES = [
    "../secret",
    "/etc/hosts",
    "..",
    ".",
    "",
    "a/b",
    "a\\b",
    "c:x",
    ".hidden",
    "a\0b",
    "a\nb",
]


@pytest.mark.parametrize("name", ESCAPES)
def test_no_name_leads_out_of_the_folder(name: str, folder: Path) -> None:
    with pytest.raises(ValueError, match="must be a file's plain name"):
        save(folder, plain(), files={name: b"x"})
    assert not folder.exists()
    save(folder, plain())
    (folder.parent / "secret").write_bytes(b"x")
    entry = {"bytes": 1, "sha256": "0"}
    rewrite(folder, lambda data: data["files"].update({name: entry}))
    refused(folder, "must be a file's plain name")


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS, "README.md", "readme.MD", "Config.json"])
def test_our_own_names_are_taken(name: str, folder: Path) -> None:
    with pytest.raises(ValueError, match="is written by save; choose another name"):
        save(folder, plain(), files={name: b"x"})


@pytest.mark.parametrize("name", [WEIGHTS, "tokenizer.json"])
def test_damage_is_named(name: str, folder: Path) -> None:
    save(folder, plain(), files={"tokenizer.json": b'{"a": 1}'})
    path = folder / name
    good = path.read_bytes()
    for size in (0, 1, len(good) - 1):
        path.write_bytes(good[:size])
        refused(folder, f"{name} has {size} bytes instead of {len(good)}")
        refused(folder, f"{name} has {size} bytes instead of {len(good)}", verify=False)
    for bit in range(0, 8 * len(good), 397):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bad)
        refused(folder, f"{name} has other bytes than were saved")
    path.unlink()
    refused(folder, f"{name} is missing")
    os.mkfifo(path)
    refused(folder, f"{name} is not a file")


def test_all_damage_is_named_at_once(folder: Path) -> None:
    save(folder, plain(), files={"a": b"1", "b": b"2", "c": b"3"})
    (folder / "a").write_bytes(b"")
    (folder / "b").write_bytes(b"x")
    (folder / "c").unlink()
    refused(folder, "a has 0 bytes instead of 1; b has other bytes")
    refused(folder, "c is missing")


def test_every_bit_of_the_config_counts(folder: Path) -> None:
    """A changed bit is refused in one line, or it changes nothing of the model."""
    save(folder, plain(2), files={"a": b"1"}, task={"stamp": 2})
    good = (folder / CONFIG).read_bytes()
    harmless = 0
    for bit in range(0, 8 * len(good), 29):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        (folder / CONFIG).write_bytes(bad)
        fault = None
        try:
            saved = load(folder)
        except ValueError as error:
            fault = str(error)
        if fault is None:
            harmless += 1
            assert saved.config == PlainConfig()
            assert stamp(saved) == 2
        else:
            assert str(folder) in fault
            assert "\n" not in fault
    assert harmless < len(good) / 29


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"\x05",
        b"\xff" * 8,
        (10).to_bytes(8, "little") + b"{}",
        b"\x08" + b"\0" * 7 + b"{'a': 1}",
    ],
)
def test_a_header_of_weights_that_is_none(bad: bytes, folder: Path) -> None:
    save(folder, plain())
    path = folder / WEIGHTS
    path.write_bytes(bad)
    rewrite(folder, lambda data: data["files"][WEIGHTS].update(bytes=len(bad)))
    refused(folder, "model.safetensors is damaged: Error while deserializing", verify=False)


def test_verify_reads_every_byte_unless_told_otherwise(folder: Path) -> None:
    save(folder, plain(1), files={"a": b"1"})
    (folder / "a").write_bytes(b"2")
    refused(folder, "a has other bytes")
    assert load(folder, verify=False).files["a"].read_bytes() == b"2"


def test_tensors_that_do_not_fit_are_all_listed(folder: Path) -> None:
    save(folder, plain())
    stored = {"mix.weight": torch.zeros(5, 11), "steps": torch.zeros(2), "b": torch.ones(1)}
    rewrite_weights(folder, {**stored, "a": torch.ones(1)})
    refused(
        folder,
        "does not fit this Plain; missing: mix.bias, table.weight; unexpected: a, b; "
        "of another shape: mix.weight (5, 11) instead of (5, 5); "
        "of another type: steps torch.float32 instead of torch.int64; if it was saved with custom",
    )


def test_what_does_not_fit_leaves_a_given_model_alone(folder: Path) -> None:
    save(folder, plain())
    rewrite_weights(folder, {"mix.weight": torch.zeros(5, 5)})
    own = plain(3.0)
    refused(folder, "missing: mix.bias, steps, table.weight", model=own)
    same(own, plain(3.0))


@pytest.mark.usefixtures("unchecked")
def test_options_that_are_wrong(folder: Path) -> None:
    save(folder, plain())
    refused(folder, "dtype (torch.int8) must be a floating one", dtype=torch.int8)
    refused(folder, 'device ("gpu") is not one that torch knows', device="gpu")


class Extra(Plain):
    def get_extra_state(self) -> int:
        return 3

    def set_extra_state(self, state: int) -> None:
        pass


def test_models_that_cannot_be_saved(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"wraps a model; save .* itself, DataParallel.module"):
        save(folder, nn.DataParallel(nn.Linear(2, 3)))
    with pytest.raises(ValueError, match=r"table.weight, .* on the meta device have no values"):
        save(folder, plain().to("meta"))
    with pytest.raises(ValueError, match="_extra_state must be a dense tensor"):
        save(folder, Extra(PlainConfig()))
    with pytest.raises(ValueError, match=r"save: task.a \(NaN\) must be a finite number"):
        save(folder, plain(), task={"a": float("nan")})
    assert not folder.parent.exists()


# What stands in the folder already


def test_a_folder_of_others_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds files but not a Regard model \(it has no config"):
        save(tmp_path, plain())
    (tmp_path / CONFIG).write_text('{"model_type": "marian"}')
    with pytest.raises(ValueError, match="choose another folder, or empty it first"):
        save(tmp_path, plain())
    assert held(tmp_path) == [CONFIG, "notes.txt"]
    with pytest.raises(ValueError, match="is not a folder; choose another name"):
        save(tmp_path / "notes.txt", plain())


def test_an_empty_folder_is_taken(folder: Path, way: str) -> None:
    folder.mkdir(parents=True)
    stamped(folder, 2)
    assert stamp(load(folder)) == 2


def test_notes_survive(folder: Path, way: str) -> None:
    stamped(folder, 2)
    (folder / "notes.txt").write_text("mine")
    (folder / "logs" / "deep").mkdir(parents=True)
    (folder / "logs" / "deep" / "events").write_text("1")
    (folder / "link").symlink_to("notes.txt")
    (folder / "dangling").symlink_to("nowhere")
    os.chmod(folder, 0o750)
    with (folder / "logs" / "deep" / "events").open("a") as writer:
        save(folder, plain(3))
        writer.write("2")
    assert (folder / "notes.txt").read_text() == "mine"
    assert (folder / "logs" / "deep" / "events").read_text() == "12"
    assert os.readlink(folder / "link") == "notes.txt"
    assert os.readlink(folder / "dangling") == "nowhere"
    # What the old save had put there and the new one did not is gone.
    assert not (folder / "stamp").exists()
    assert folder.stat().st_mode & 0o777 == 0o750
    assert held(folder.parent) == ["plain"]
    with pytest.raises(ValueError, match=r"already holds notes.txt, which no save has put there"):
        save(folder, plain(), files={"notes.txt": b""})


def test_notes_survive_without_links(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*names: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", link)
    stamped(folder, 2)
    (folder / "notes.txt").write_text("mine")
    stamped(folder, 3)
    assert (folder / "notes.txt").read_text() == "mine"


def test_what_arrives_at_the_last_moment_survives(
    folder: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stamped(folder, 2)
    put = atomic._swap_in

    def late(draft: Path, target: Path) -> Path | None:
        (folder / "late.txt").write_text("mine")
        return put(draft, target)

    monkeypatch.setattr(atomic, "_swap_in", late)
    stamped(folder, 3)
    assert (folder / "late.txt").read_text() == "mine"
    assert stamp(load(folder)) == 3


def test_files_may_come_from_the_folder_itself(folder: Path) -> None:
    save(folder, plain(2), files={"tokenizer.json": b"{}"})
    saved = load(folder)
    save(folder, saved.model, files={"tokenizer.json": saved.files["tokenizer.json"]})
    assert load(folder).files["tokenizer.json"].read_bytes() == b"{}"


def test_a_link_stays_and_its_folder_is_replaced(folder: Path, tmp_path: Path, way: str) -> None:
    link = tmp_path / "latest"
    link.symlink_to(folder)
    stamped(link, 2)
    stamped(link, 3)
    assert link.is_symlink()
    assert stamp(load(link)) == stamp(load(folder)) == 3
    assert held(tmp_path) == ["latest", "runs"]
    assert held(folder.parent) == ["plain"]


def test_the_working_directory_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stamped(folder, 2)
    monkeypatch.chdir(folder)
    with pytest.raises(ValueError, match="holds the working directory"):
        save(".", plain())
    monkeypatch.chdir(folder.parent)
    stamped(Path("plain"), 3)
    assert stamp(load("plain")) == 3


# Crashes


CHANGES = "os.mkdir os.rename os.link os.symlink os.remove os.rmdir os.chmod os.utime ctypes.dlsym"


def killed_before(change: int, work: Callable[[], None]) -> bool:
    """Whether a process that does this work was killed before its n-th change of the disk."""
    with warnings.catch_warnings():
        # Python warns of threads that might hold locks; the child touches none.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child:
        status = os.waitpid(child, 0)[1]
        assert status in (0, signal.SIGKILL)
        return status != 0
    left = change

    def hook(event: str, details: tuple[Any, ...]) -> None:
        nonlocal left
        writes = event == "open" and details[2] & (os.O_WRONLY | os.O_CREAT)
        if writes or event in CHANGES.split():
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    try:
        sys.addaudithook(hook)
        work()
        os._exit(0)
    finally:
        os._exit(1)


def test_a_crash_at_every_step(
    folder: Path, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A killed process loses nothing that it wrote.
    monkeypatch.setattr(os, "fsync", lambda opened: None)
    old = tmp_path / "old"
    stamped(old, 2)
    (old / "notes.txt").write_text("mine")
    (old / "logs").mkdir()
    (old / "logs" / "events").write_text("1")
    outcomes = []
    killed = True
    while killed:
        shutil.rmtree(folder.parent, ignore_errors=True)
        shutil.copytree(old, folder)
        killed = killed_before(len(outcomes), lambda: stamped(folder, 3))
        saved = load(folder)
        outcomes.append(stamp(saved))
        assert saved.files["stamp"].read_text() == str(outcomes[-1])
        assert (saved.folder / "notes.txt").read_text() == "mine"
        # The next save is none the worse for it, and leaves nothing lying about.
        stamped(folder, 5)
        assert stamp(load(folder)) == 5
        assert held(folder.parent) == ["plain"]
        assert (folder / "logs" / "events").read_text() == "1"
    # Once the new folder is in place, it stays so however much later the crash comes.
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {2, 3}
    assert len(outcomes) > 15


def test_a_crash_of_the_first_save(folder: Path) -> None:
    crashes = 0
    while killed_before(crashes, lambda: stamped(folder, 3)):
        refused(folder, "does not exist")
        crashes += 1
    assert crashes > 5
    assert stamp(load(folder)) == 3
    assert held(folder.parent) == ["plain"]


def test_two_crashes_in_a_row(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between two renames, and the save that sets it right is killed as well."""
    monkeypatch.setattr(atomic, "_swap", lambda one, other: False)
    stamped(folder, 2)
    shutil.copytree(folder, folder.with_name(".plain.saving-0123abcd"))
    folder.rename(folder.with_name(".plain.replaced-0123abcd"))
    assert stamp(load(folder)) == 2
    crashed = tmp_path / "crashed"
    shutil.copytree(folder.parent, crashed)
    second, killed, outcomes = 0, True, []
    while killed:
        shutil.rmtree(folder.parent)
        shutil.copytree(crashed, folder.parent)
        killed = killed_before(second, lambda: stamped(folder, 5))
        outcomes.append(stamp(load(folder)))
        second += 1
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {2, 5}
    assert held(folder.parent) == ["plain"]


def test_an_empty_folder_does_not_cost_the_one_put_aside(folder: Path) -> None:
    stamped(folder, 2)
    folder.rename(folder.with_name(".plain.replaced-0123abcd"))
    folder.mkdir()
    (folder.with_name(".plain.replaced-0123abcd") / "notes").write_text("mine")
    with pytest.raises(ValueError, match="already holds notes"):
        save(folder, plain(), files={"notes": b""})
    assert stamp(load(folder)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("way", ["swap", "two renames"])
def test_kills_at_random_moments(way: str, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "plain"
    code = f"""
from tests.test_checkpoint import *
checkpoint._classes = lambda kind, where: (Plain, PlainConfig)
if {way!r} == "two renames":
    atomic._swap = lambda one, other: False
folder = Path({str(folder)!r})
value = stamp(load(folder))
while True:
    value = (value + 1) % 100
    stamped(folder, value)
    print(value, flush=True)
"""
    stamped(folder, 0)
    (folder / "notes.txt").write_text("mine")
    for n in range(7):
        saver = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
        assert saver.stdout is not None
        assert saver.stdout.readline()
        time.sleep(0.011 * n)
        saver.send_signal(signal.SIGKILL)
        saver.communicate()
        saved = load(folder)
        stamp(saved)
        assert (saved.folder / "notes.txt").read_text() == "mine"
    stamped(folder, 1)
    assert held(folder.parent) == ["plain"]


def test_a_dead_saves_folder_goes_and_a_living_ones_stays(folder: Path) -> None:
    stamped(folder, 2)
    dead = folder.with_name(".plain.saving-0123abcd")
    shutil.copytree(folder, dead)
    another = folder.with_name(".plain.saving-x.saving-0123abcd")
    another.mkdir()
    with atomic.draft(folder) as living:
        stamped(folder, 3)
        assert held(folder.parent) == sorted([another.name, living.name, "plain"])
    assert held(folder.parent) == [another.name, "plain"]


def test_two_saves_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The later one to finish stays, whole."""
    stamped(folder, 2)
    put = atomic._swap_in

    def interrupted(draft: Path, target: Path) -> Path | None:
        monkeypatch.setattr(atomic, "_swap_in", put)
        stamped(folder, 3)
        return put(draft, target)

    monkeypatch.setattr(atomic, "_swap_in", interrupted)
    stamped(folder, 5)
    assert stamp(load(folder)) == 5
    assert held(folder.parent) == ["plain"]


@pytest.mark.parametrize("verify", [True, False])
def test_a_reader_sees_the_old_or_the_new(
    verify: bool, folder: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda opened: None)
    stamped(folder, 0)
    done = threading.Event()
    faults = []

    def saves() -> None:
        try:
            for value in range(1, 17):
                stamped(folder, value)
        except Exception as error:
            faults.append(error)
        done.set()

    saver = threading.Thread(target=saves)
    saver.start()
    seen = []
    while not done.is_set():
        seen.append(stamp(load(folder, verify=verify)))
    saver.join()
    assert not faults
    assert seen == sorted(seen)
    assert len(set(seen)) > 3


# Full disks


def untouched(folder: Path) -> None:
    assert stamp(load(folder)) == 2
    assert held(folder.parent) == ["plain"]


@pytest.mark.parametrize("where", ["write_bytes", "write_text"])
def test_a_full_disk(where: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stamped(folder, 2)

    def full(*words: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Path, where, full)
        with pytest.raises(
            ValueError, match="was not saved, and holds what it held: No space left"
        ):
            stamped(folder, 3)
    untouched(folder)


def test_a_disk_that_refuses_the_weights(folder: Path) -> None:
    stamped(folder, 2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))
    try:
        with pytest.raises(ValueError, match=r"was not saved, and holds what it held: .*too large"):
            stamped(folder, 3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    untouched(folder)


@pytest.mark.parametrize("failing", ["_swap", "sync", "carry"])
def test_any_refusal_leaves_the_old_folder(
    failing: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stamped(folder, 2)

    def fails(*names: object) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), "runs")

    with monkeypatch.context() as patch:
        patch.setattr(atomic, failing, fails)
        with pytest.raises(ValueError, match=r"was not saved, .*: .* busy \(runs\)"):
            stamped(folder, 3)
    untouched(folder)


def test_the_second_of_two_renames_fails(
    folder: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stamped(folder, 2)
    rename = os.rename
    calls = []

    def fails(one: Path, other: Path) -> None:
        calls.append(other)
        if len(calls) == 3:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(one, other)

    if way == "two renames":
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", fails)
            with pytest.raises(ValueError, match="Input/output error"):
                stamped(folder, 3)
    untouched(folder)


def test_an_interrupted_save(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stamped(folder, 2)

    def interrupt(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(atomic, "sync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            stamped(folder, 3)
    untouched(folder)


def test_a_file_to_copy_that_is_not_there(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"No such file or directory \(.*gone.json\)"):
        save(folder, plain(), files={"tokenizer.json": tmp_path / "gone.json"})
    assert held(folder.parent) == []


def test_the_swap_works_here(tmp_path: Path) -> None:
    """Else every test above would have gone the way of two renames."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text("")
    if atomic._swap(tmp_path / "one", tmp_path / "two"):
        assert (tmp_path / "one" / "two").exists()
        assert (tmp_path / "two" / "one").exists()
    else:
        pytest.skip("this filesystem cannot swap")


# The model card


def test_the_card_is_true(folder: Path) -> None:
    model = plain()
    files = {"tokenizer.json": b"{}"}
    task = {"name": "pears", "example": "regard ripen {run}"}
    save(folder, model, files=files, task=task, origin="Trained on pears.\n")
    card = (folder / "README.md").read_text()
    assert card.startswith("# plain\n\nA Plain, saved by Regard")
    count = sum(parameter.numel() for parameter in model.parameters())
    assert f"| parameters | {count:,} |" in card
    assert "| width | 5 |" in card
    assert "tokenizer.json" in card
    assert "regard ripen plain" in card
    assert card.endswith("## Where the weights come from\n\nTrained on pears.\n")
    save(folder, model)
    card = (folder / "README.md").read_text()
    assert "regard translate" not in card
    assert "come from" not in card


def test_the_cards_python_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(folder, small_models()[3])
    card = (folder / "README.md").read_text()
    code = re.search(r"```python\n(.*?)```", card, re.DOTALL)
    assert code is not None
    monkeypatch.chdir(folder.parent)
    names: dict[str, Any] = {}
    exec(code[1], names)
    assert isinstance(names["model"], LanguageModel)


def test_card_of_a_task_loads_a_predictor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = (samples.labeler(tmp_path / "mood") / "README.md").read_text()
    code = re.search(r"```python\n(.*?)```", card, re.DOTALL)
    assert code is not None
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(code[1], names)
    assert isinstance(names["predictor"], Labeler)
