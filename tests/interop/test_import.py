"""`regard import` and `regard export`, and the files that they read and write."""

import json
import pickle
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from regard import Transformer, checkpoint, interop
from regard.cli import main as cli
from regard.interop import tensors
from regard.interop.tensors import Pair, fill, give, load, settings
from regard.model.transformer import TransformerConfig

Capture = pytest.CaptureFixture[str]

WORDS = """the cat sat on a mat and a dog ran to the cat
a green bird sang and the dog slept near the red house
we read the same book again and again in the small garden""".splitlines()
TASK = {"name": "translate", "start": 5, "end": 3, "pad": 5}


def model() -> Transformer:
    config = TransformerConfig(
        47,
        width=15,
        heads=3,
        feed_forward=11,
        encoder_layers=1,
        decoder_layers=2,
        activation="silu",
        position="sinusoidal-halves",
        output_bias=True,
    )
    made = Transformer(config).eval()
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    return made


@pytest.fixture
def marian(tmp_path: Path) -> Path:
    """A Marian folder; tests/interop/test_marian.py shows that it is one."""
    interop.write(model(), tmp_path / "marian", "marian", task=TASK)
    return tmp_path / "marian"


def regard(capsys: Capture, *words: object) -> tuple[int, str, str]:
    status = cli.main([str(word) for word in words])
    said = capsys.readouterr()
    return status, said.out, said.err


def refused(capsys: Capture, *words: object) -> str:
    status, out, said = regard(capsys, *words)
    assert (status, out) == (2, "")
    assert re.fullmatch(r"regard: [^\n]+\n", said)
    return said


# The commands


def test_there_and_back(marian: Path, tmp_path: Path, capsys: Capture) -> None:
    pieces = {"source.spm": b"\x00\xff source", "target.spm": b"\x00\xff target"}
    vocabulary = json.dumps({"</s>": 0, "▁a": 46}, indent=1).encode()
    pieces |= {"vocab.json": vocabulary, "tokenizer_config.json": b'{ "target_lang": "de" }'}
    for name, content in pieces.items():
        (marian / name).write_bytes(content)

    status, out, said = regard(capsys, "import", marian, tmp_path / "run")
    assert (status, said) == (0, "")
    count = sum(parameter.numel() for parameter in model().parameters())
    assert out == f"{tmp_path / 'run'}: a Transformer of {count:,} parameters\n"
    saved = checkpoint.load(tmp_path / "run")
    assert saved.task is not None
    assert saved.task.items() >= TASK.items()
    assert {name: saved.files[name].read_bytes() for name in pieces} == pieces
    assert "The Marian model marian." in (tmp_path / "run" / "README.md").read_text()

    status, out, said = regard(capsys, "export", tmp_path / "run", tmp_path / "out", "--to=marian")
    assert (status, said) == (0, "")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        *pieces,
    }
    for name in (*pieces, "config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (marian / name).read_bytes()
    was, comes = (load_file(folder / "model.safetensors") for folder in (marian, tmp_path / "out"))
    assert was.keys() == comes.keys()
    assert all(was[name].equal(comes[name]) for name in was)


def test_the_imported_model_computes_the_same(
    marian: Path, tmp_path: Path, capsys: Capture
) -> None:
    regard(capsys, "import", marian, tmp_path / "run")
    imported, saved = interop.read(marian), checkpoint.load(tmp_path / "run")
    source, target = torch.randint(47, (3, 7)), torch.randint(47, (3, 5))
    with torch.no_grad():
        assert saved.model(source, target).equal(imported.model(source, target))


def test_no_tokenizer_is_a_warning(marian: Path, tmp_path: Path, capsys: Capture) -> None:
    status, out, said = regard(capsys, "import", marian, tmp_path / "run")
    assert status == 0
    assert re.fullmatch(r"regard: [^\n]*source\.spm, target\.spm, vocab\.json[^\n]*\n", said)
    assert checkpoint.load(tmp_path / "run").files.keys() >= {"model.safetensors"}


@pytest.mark.parametrize(
    "words",
    [["import"], ["import", "one"], ["export", "run", "out"], ["export", "a", "b", "--to", "gguf"]],
)
def test_wrong_words(words: list[str], capsys: Capture) -> None:
    assert cli.main(words) == 2
    assert re.fullmatch(r"regard: [^\n]+\n", capsys.readouterr().err)


def test_the_choices_are_the_formats_there_are() -> None:
    assert cli._parser().parse_args(["export", "a", "b", "--to", "vit"]).to == "vit"
    kinds = interop.Kind.__args__
    with pytest.raises(ValueError, match=f"'gguf'.*{', '.join(kinds)}"):
        interop.write(model(), "out", "gguf")


def test_what_cannot_be_exported_is_one_line(tmp_path: Path, capsys: Capture) -> None:
    checkpoint.save(tmp_path / "run", model(), task=TASK)
    said = refused(capsys, "export", tmp_path / "run", tmp_path / "out", "--to", "vit")
    assert "Transformer" in said
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("")
    said = refused(capsys, "export", tmp_path / "run", tmp_path / "file", "--to", "marian")
    assert "name a new one" in said
    refused(capsys, "export", tmp_path / "absent", tmp_path / "out", "--to", "marian")


def test_a_folder_that_cannot_be_written(marian: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "file").write_text("")
    refused(capsys, "import", marian, tmp_path / "file" / "run")
    said = refused(capsys, "import", marian, marian)  # the source is no Regard folder to replace
    assert str(marian) in said
    assert interop.read(marian).model is not None


# What there is to import


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ('{"model_type": "t5"}', '"t5"'),
        ('{"architecture": "resnet50"}', '"resnet50"'),
        ("{}", "model_type null"),
        ("[]", "JSON object"),
        ("{,", "not JSON"),
        ('{"model_type": ["marian"]}', "marian"),
        ('{"format": 1, "regard": "0.1.0"}', "Regard folder already"),
    ],
)
def test_other_configs(config: str, word: str, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "config.json").write_text(config)
    assert word in refused(capsys, "import", tmp_path, tmp_path / "run")


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"model_type": "marian"}, "marian"),
        ({"model_type": "vit"}, "vit"),
        ({"architecture": "vit_base_patch16_224"}, "timm"),
    ],
)
def test_what_a_config_says_it_is(config: dict[str, Any], kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert interop.detect(tmp_path) == kind


def test_a_folder_without_a_config(tmp_path: Path, capsys: Capture) -> None:
    assert "has no config.json" in refused(capsys, "import", tmp_path, tmp_path / "run")


@pytest.mark.parametrize("source", ["./opus", "/no/such/folder", "a/b/c", "..", "-x", "a b"])
def test_a_path_that_does_not_exist(source: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    if source == "..":
        assert interop.find(source) == Path("..")
        return
    with pytest.raises(ValueError, match=f"{re.escape(source)} does not exist; name"):
        interop.find(source)


# The hub


def hub(monkeypatch: pytest.MonkeyPatch, download: Any) -> None:
    module = SimpleNamespace(snapshot_download=download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)


def test_a_name_is_fetched(
    marian: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    asked = []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, "*.bin" in allow_patterns))
        return str(marian)

    hub(monkeypatch, download)
    status, _, _ = regard(capsys, "import", "Helsinki-NLP/opus-mt-en-de", tmp_path / "run")
    assert status == 0
    assert asked == [("Helsinki-NLP/opus-mt-en-de", False)]
    card = (tmp_path / "run" / "README.md").read_text()
    assert "Helsinki-NLP/opus-mt-en-de, from the hub." in card


def test_pickled_weights_are_fetched_only_where_there_are_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.append("*.bin" in allow_patterns)
        return str(tmp_path)

    hub(monkeypatch, download)
    assert interop.find("some/model") == tmp_path
    assert asked == [False, True]


def test_no_network_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def download(name: str, allow_patterns: list[str]) -> str:
        raise ConnectionError("no route\nto host")

    hub(monkeypatch, download)
    said = refused(capsys, "import", "Helsinki-NLP/opus-mt-en-de", tmp_path / "run")
    assert "no route to host" in said
    assert "download" in said


def test_no_hub_library_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    said = refused(capsys, "import", "opus-mt-en-de", tmp_path / "run")
    assert "pip install huggingface_hub" in said


# Files of tensors


def test_safetensors_come_before_pickled_ones(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "model.safetensors")
    torch.save({"a": torch.zeros(3)}, tmp_path / "pytorch_model.bin")
    assert load(tmp_path)["a"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_shards(name: str, tmp_path: Path) -> None:
    stem, ending = name.split(".")
    parts = [f"{stem}-{n}-of-2.{ending}" for n in (1, 2)]
    held = [{"a": torch.ones(3), "b": torch.zeros(5)}, {"c": torch.ones(7)}]
    for part, content in zip(parts, held, strict=True):
        (save_file if ending == "safetensors" else torch.save)(content, tmp_path / part)
    places = {"a": parts[0], "b": parts[0], "c": parts[1]}
    index = tmp_path / f"{name}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    assert sorted(load(tmp_path)) == ["a", "b", "c"]

    index.write_text(json.dumps({"weight_map": {"a": parts[0], "d": parts[1]}}))
    with pytest.raises(ValueError, match=r"disagree: missing d; unexpected b, c"):
        load(tmp_path)
    index.write_text(json.dumps({"weight_map": places | {"c": f"../{parts[1]}"}}))
    with pytest.raises(ValueError, match=r"outside the folder: \.\./"):
        load(tmp_path)
    index.write_text(json.dumps({"weight_map": {}}))
    with pytest.raises(ValueError, match="weight_map"):
        load(tmp_path)
    index.write_text(json.dumps({"weight_map": places}))
    (tmp_path / parts[1]).unlink()
    with pytest.raises(ValueError, match=f"lacks shards: {parts[1]}"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["state_dict", "model"])
def test_weights_among_other_things(name: str, tmp_path: Path) -> None:
    torch.save({name: {"a": torch.ones(3)}, "epoch": 5}, tmp_path / "last.pth")
    assert list(load(tmp_path / "last.pth")) == ["a"]


class _Evil:
    def __reduce__(self) -> Any:
        return (print, ("executed",))


def test_nothing_is_executed(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": _Evil()}, path)
    with pytest.raises(ValueError, match=r"\A[^\n]+more than weights[^\n]+safetensors[^\n]*\Z"):
        load(path)
    path.write_bytes(pickle.dumps(_Evil()))
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z"):
        load(path)
    assert "executed" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_every_truncation_is_one_line(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    content = {"a": torch.ones(3, 5), "b": torch.ones(2)}
    (save_file if name.endswith("s") else torch.save)(content, path)
    whole = path.read_bytes()
    for length in [*range(0, len(whole), len(whole) // 23), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=rf"\A{re.escape(str(path))}[^\n]+\Z"):
            load(tmp_path)


def test_files_that_hold_no_weights(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no weights"):
        load(tmp_path)
    (tmp_path / "model.onnx").write_text("")
    with pytest.raises(ValueError, match=r"known are \.safetensors"):
        load(tmp_path / "model.onnx")
    torch.save([torch.ones(3)], tmp_path / "list.bin")
    with pytest.raises(ValueError, match="tensors by name"):
        load(tmp_path / "list.bin")
    with pytest.raises(ValueError, match="does not exist"):
        settings(tmp_path / "absent")


# Pairs


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 5, bias=False), nn.Linear(3, 2, bias=False)
        self.tied = nn.Linear(3, 5, bias=False)
        self.tied.weight = self.one.weight


def split(tensor: Tensor) -> tuple[Tensor, ...]:
    return tensor.split([5, 2])


PAIRS = [Pair("joined", ("one.weight", "two.weight"), split, torch.cat)]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_parts_get_memory_of_their_own_and_ties_stay(device: str) -> None:
    with torch.device(device):
        small = Small()
    joined = torch.randn(7, 3)
    fill(small, {"joined": joined}, PAIRS, "there")
    assert small.tied.weight is small.one.weight
    assert give(small, PAIRS)["joined"].equal(joined)
    with torch.no_grad():
        small.one.weight.zero_()
    assert small.two.weight.equal(joined[5:])
    assert not joined.eq(0).any()


def test_the_finest_precision_is_kept() -> None:
    small = Small()
    pairs = [Pair("a", "one.weight"), Pair("b", "two.weight")]
    values = {"a": torch.randn(5, 3).half(), "b": torch.randn(2, 3).bfloat16()}
    fill(small, values, pairs, "there")
    assert {parameter.dtype for parameter in small.parameters()} == {torch.float32}
    assert small.one.weight.equal(values["a"].float())


def test_nothing_changes_where_something_does_not_fit() -> None:
    small = Small()
    was = small.one.weight.clone()
    pairs = [Pair("a", "one.weight"), Pair("b", "two.weight")]
    with pytest.raises(ValueError, match="there does not fit its config: missing b; unexpected c"):
        fill(small, {"a": torch.zeros(5, 3), "c": torch.zeros(1)}, pairs, "there")
    assert small.one.weight.equal(was)


def test_a_new_folder_is_like_any_other(tmp_path: Path) -> None:
    with tensors.new_folder(tmp_path / "deep" / "new") as draft:
        tensors.store(draft, {"a": torch.ones(3)}, {"config.json": {"ü": 1}})
    (tmp_path / "made").mkdir()
    modes = {(tmp_path / name).stat().st_mode for name in ("deep/new", "made")}
    assert len(modes) == 1
    assert settings(tmp_path / "deep" / "new") == {"ü": 1}
    shared = torch.ones(3)
    with tensors.new_folder(tmp_path / "made") as draft:
        tensors.store(draft, {"a": shared, "b": shared[:2]}, {})
    assert load(tmp_path / "made")["b"].tolist() == [1, 1]


# The tokenizer


@pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")
def test_transformers_opens_the_tokenizer_that_came_along(
    marian: Path, tmp_path: Path, capsys: Capture
) -> None:
    transformers = pytest.importorskip("transformers")
    pieces = pytest.importorskip("sentencepiece")
    (tmp_path / "text").write_text("\n".join(WORDS * 7))
    pieces.SentencePieceTrainer.train(
        input=str(tmp_path / "text"),
        model_prefix=str(marian / "source"),
        vocab_size=43,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (marian / "source.model").rename(marian / "source.spm")
    (marian / "source.vocab").unlink()
    shutil.copyfile(marian / "source.spm", marian / "target.spm")
    known = pieces.SentencePieceProcessor(model_file=str(marian / "source.spm"))
    names = [known.id_to_piece(n) for n in range(known.get_piece_size())]
    names = ["</s>", "<unk>", *(name for name in names if name not in ("<s>", "</s>", "<unk>"))]
    names = [*names[:46], "<pad>"]
    (marian / "vocab.json").write_text(json.dumps({name: n for n, name in enumerate(names)}))
    (marian / "tokenizer_config.json").write_text(
        json.dumps({"source_lang": "en", "target_lang": "de", "tokenizer_class": "MarianTokenizer"})
    )
    status, _, said = regard(capsys, "import", marian, tmp_path / "run")
    assert (status, said) == (0, "")
    regard(capsys, "export", tmp_path / "run", tmp_path / "out", "--to", "marian")
    first, second = (
        transformers.MarianTokenizer.from_pretrained(folder)
        for folder in (marian, tmp_path / "out")
    )
    assert second(WORDS)["input_ids"] == first(WORDS)["input_ids"]
    assert second.decode(second(WORDS[0])["input_ids"], skip_special_tokens=True) == WORDS[0]


def test_a_config_that_asks_for_the_moon(marian: Path, capsys: Capture) -> None:
    path = marian / "config.json"
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | {"decoder_layers": 10**9}))
    said = refused(capsys, "import", marian, marian / "run")
    assert "more than there are tensors in the weights" in said
    path.unlink()
    path.symlink_to("/dev/zero")
    assert "is no ordinary file" in refused(capsys, "import", marian, marian / "run")


def test_an_export_to_a_full_disk(
    marian: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert regard(capsys, "import", marian, tmp_path / "run")[0] == 0

    def full(*words: object, **options: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("regard.interop.tensors.save_file", full)
    said = refused(capsys, "export", tmp_path / "run", tmp_path / "out", "--to", "marian")
    assert re.search(r"out was not saved.*No space left", said)
    assert not (tmp_path / "out").exists()
    assert not [path for path in tmp_path.iterdir() if "saving" in path.name]
