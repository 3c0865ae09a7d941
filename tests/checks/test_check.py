"""The contract holds for every kind of model, and each way of breaking it is caught."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as functional
from PIL import Image
from torch import Tensor

from regard import Transformer, checkpoint
from regard.attention.cache import SelfCache
from regard.attention.core import Observer
from regard.checks import Finding, check, sample
from regard.checks import properties as contract
from regard.checks.properties import PROPERTIES
from regard.cli import main as cli
from regard.decode.engine.int8.engine import Int8Session
from regard.interop import ctranslate2 as ct2
from regard.model.block import FeedForward
from regard.model.transformer import TransformerConfig
from regard.task.specs import spec
from regard.train import fit as training

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch

WORDS = ("a", "man", "in", "red", "rides", "the", "bicycle", "two", "dogs", "run", "through")
SHAPE: dict[str, Any] = {"width": 24, "heads": 4, "feed_forward": 29, "dropout": 0.1}


def sentences(count: int, seed: int) -> list[str]:
    """Of different lengths."""
    chance = np.random.default_rng(seed)
    return [" ".join(chance.choice(WORDS, chance.integers(2, 14))) for _ in range(count)]


def untrained(task: str, folder: Path, config: Any) -> Path:
    """A folder as training leaves it, without the training."""
    made = spec(task).build(config)
    checkpoint.save(folder, made.model, files=made.files(), task=made.about())
    return folder


def text(folder: Path, name: str, seed: int) -> str:
    path = folder / name
    path.write_text("".join(f"{line}\n" for line in sentences(60, seed)))
    return str(path)


def shaped(config: Any, **changes: Any) -> Any:
    return replace(config, model=replace(config.model, **SHAPE, **changes))


def translate(folder: Path) -> Path:
    config = shaped(spec("translate").preset("tiny"), encoder_layers=1, decoder_layers=2)
    config = replace(
        config,
        source=(text(folder, "source", 1),),
        target=(text(folder, "target", 2),),
        vocabulary=300,
        cache=str(folder / "cache"),
        training=replace(config.training, batch=128),
    )
    return untrained("translate", folder / "translate", config)


def language(folder: Path) -> Path:
    config = shaped(spec("language").preset("tiny"), layers=2)
    files = {"text": (text(folder, "text", 3),), "cache": str(folder / "cache")}
    config = replace(config, vocabulary=300, context=23, examples="lines", **files)
    return untrained("language", folder / "language", config)


def label(folder: Path) -> Path:
    path = folder / "labels.tsv"
    lines = [f"{'yes' if n % 2 else 'no'}\t{line}\n" for n, line in enumerate(sentences(60, 4))]
    path.write_text("".join(lines))
    config = replace(
        shaped(spec("label").preset("tiny"), layers=2), texts=(str(path),), vocabulary=300
    )
    return untrained("label", folder / "label", config)


def encoder(folder: Path) -> Path:
    config = shaped(spec("encoder").preset("tiny"), layers=2)
    files = {"text": (text(folder, "text", 3),), "cache": str(folder / "cache")}
    config = replace(config, vocabulary=300, context=23, **files)
    return untrained("encoder", folder / "encoder", config)


def classify(folder: Path) -> Path:
    config = shaped(spec("classify").preset("tiny"), layers=1)
    return untrained("classify", folder / "classify", config)


def read(folder: Path) -> Path:
    config = shaped(spec("read").preset("tiny"), encoder_layers=1, decoder_layers=1)
    return untrained("read", folder / "read", config)


@pytest.fixture(scope="module")
def translator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return translate(tmp_path_factory.mktemp("runs"))


SLOW = ("compiled = eager", "exported = native", "hooks fire", "resumed = uninterrupted")
"""Each takes a second or more."""


def findings(folder: Path, *names: str, **options: Any) -> dict[str, Finding]:
    report = check(folder, properties=names or None, device="cpu", **options)
    return {finding.name: finding for finding in report}


def regard(capsys: Capture, *words: object) -> tuple[int, str, str]:
    status = cli.main([str(word) for word in words])
    said = capsys.readouterr()
    return status, said.out, said.err


# It holds


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_command(compiled: bool, translator: Path, capsys: Capture, monkeypatch: Patch) -> None:
    wanted = [one for one in PROPERTIES if compiled or one.name != "compiled = eager"]
    monkeypatch.setattr(contract, "PROPERTIES", wanted)
    status, out, said = regard(capsys, "check", translator, "--device", "cpu", "--json")
    assert (status, said) == (0, "")
    found = json.loads(out)
    assert found["holds"]
    assert found["data"] == "the run's own data"
    measured = {one["name"]: one for one in found["properties"]}
    assert measured.keys() == {one.name for one in wanted}
    skipped = {name for name, one in measured.items() if one["status"] == "skipped"}
    gpu = {"captured = eager", "fused steps = plain"}
    assert skipped <= {*gpu, "engine = eager", "exported = native"}
    assert "captured = eager" in skipped
    for one in measured.values():
        assert one["status"] == "skipped" or 0 <= one["difference"] <= one["tolerance"]


@pytest.mark.parametrize(
    "make",
    [
        *(pytest.param(one, marks=pytest.mark.slow) for one in (label, encoder)),
        language,
        classify,
        read,
    ],
)
def test_other_kinds(make: Callable[[Path], Path], tmp_path: Path) -> None:
    names = [one.name for one in PROPERTIES if one.name not in SLOW]
    found = findings(make(tmp_path), *names)
    assert {finding.status for finding in found.values()} == {"holds", "skipped"}
    writes = make in (language, read)
    for name in ("cached = uncached", "beam 1 = greedy", "int8 ≈ fp32"):
        assert (found[name].status == "holds") == writes
    assert (found["packed = padded"].status == "holds") == (make is not classify)
    assert found["fused = formula"].status == "holds"


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("make", [language, label, encoder, classify, read])
def test_the_slow_ones_too(make: Callable[[Path], Path], tmp_path: Path) -> None:
    found = findings(make(tmp_path), *SLOW)
    assert {finding.status for finding in found.values()} == {"holds"}


@pytest.mark.slow
def test_data_of_ones_own(translator: Path, tmp_path: Path, capsys: Capture) -> None:
    path = text(tmp_path, "other", 7)
    found = findings(translator, "packed = padded", "cached = uncached", data=[path])
    assert all(finding.status == "holds" for finding in found.values())
    assert check(translator, data=[path], properties=[], device="cpu").origin == path
    examples, _ = sample.examples(checkpoint.load(translator), translator, [path])
    assert len({len(example.source) for example in examples if example.source is not None}) > 3
    image = tmp_path / "digit.png"
    Image.new("L", (8, 8), 128).save(image)
    report = check(
        classify(tmp_path), data=[str(image)], properties=["batch = one by one"], device="cpu"
    )
    assert [finding.status for finding in report] == ["holds"]
    assert report.examples == 1


def test_a_model_without_a_task(tmp_path: Path) -> None:
    small = TransformerConfig(300, **SHAPE, encoder_layers=1, decoder_layers=1)
    checkpoint.save(tmp_path / "model", Transformer(small))
    report = check(tmp_path / "model", properties=[], device="cpu")
    assert report.origin.startswith("random inputs")
    found = findings(tmp_path / "model", "packed = padded", "beam 1 = greedy", "loaded = saved")
    assert {finding.status for finding in found.values()} == {"holds"}
    with pytest.raises(ValueError, match="names no task; check it without"):
        check(tmp_path / "model", data=["lines"], device="cpu")


def test_what_it_is_given(translator: Path, tmp_path: Path, capsys: Capture) -> None:
    for words, wanted in (
        ((tmp_path / "nothing",), "nothing"),
        ((translator, "--data", tmp_path / "nothing"), "nothing"),
        ((translator, "--device", "moon"), "moon"),
    ):
        status, out, said = regard(capsys, "check", *words)
        assert (status, out) == (2, "")
        assert re.fullmatch(rf"regard: [^\n]*{wanted}[^\n]*\n", said)
    (tmp_path / "empty").touch()
    assert "--data" in regard(capsys, "check", translator, "--data", tmp_path / "empty")[2]


# It is broken on purpose


def fused(patch: Patch) -> None:
    attend = torch.nn.functional.scaled_dot_product_attention

    def wrong(query: Tensor, *others: Any, **options: Any) -> Tensor:
        return attend(query * 1.01, *others, **options)

    patch.setattr("torch.nn.functional.scaled_dot_product_attention", wrong)


def packed(patch: Patch) -> None:
    from regard.attention.packed import PackedLengths

    patch.setattr(PackedLengths, "positions", lambda self: torch.arange(self.total)[None])
    patch.setattr(
        PackedLengths, "sequence", lambda self: torch.zeros(self.total, dtype=torch.int32)
    )
    patch.setattr(
        PackedLengths,
        "_offsets",
        lambda self, device: torch.tensor(
            [0, *[self.total] * len(self.lengths)], dtype=torch.int32
        ),
    )


def cached(patch: Patch) -> None:
    patch.setattr(SelfCache, "places", lambda self, count: 0)


def beams(patch: Patch) -> None:
    found = contract.beam

    def wrong(session: Any, prompts: Any, **options: Any) -> Any:
        return found(session, prompts, **options | {"banned": [5, 6, 7, *range(100, 290)]})

    patch.setattr(contract, "beam", wrong)


def batch(patch: Patch) -> None:
    patch.setattr("regard.model.transformer.source_mask", lambda *_: None)
    patch.setattr("regard.model.transformer.memory_and_mask", lambda memory, *_: (memory, None))


def engine(patch: Patch) -> None:
    step = Int8Session.step
    patch.setattr(Int8Session, "step", lambda self, tokens: 1.1 * step(self, tokens))


def compiled(patch: Patch) -> None:
    def wrong(function: Any, **options: Any) -> Any:
        return lambda *given: [1.001 * rows for rows in function(*given)]

    patch.setattr(torch, "compile", wrong)


def narrow(patch: Patch) -> None:
    narrowed = torch.nn.Module.bfloat16

    def wrong(self: Any) -> Any:
        model = narrowed(self)
        model.output.weight.data = model.output.weight.flip(0)
        return model

    patch.setattr(torch.nn.Module, "bfloat16", wrong)


def eight_bits(patch: Patch) -> None:
    quantized = contract.int8

    def wrong(model: Any) -> Any:
        model.decoder.norm.weight.data.neg_()
        return quantized(model)

    patch.setattr(contract, "int8", wrong)


def recorded(patch: Patch) -> None:
    from regard.look import record

    def wrong(see: Any) -> Observer:
        return Observer(lambda inputs: inputs._replace(value=inputs.value * 1.01), see)

    patch.setattr(record, "Observer", wrong)


def exported(patch: Patch) -> None:
    pytest.importorskip("ctranslate2")
    give = ct2.give

    def wrong(model: Any, pairs: Any) -> dict[str, Tensor]:
        return {name: tensor * 1.01 for name, tensor in give(model, pairs).items()}

    patch.setattr(ct2, "give", wrong)


def saved(patch: Patch) -> None:
    tensors = checkpoint._tensors

    def wrong(model: Any) -> dict[str, Tensor]:
        return {name: tensor.nextafter(tensor + 1) for name, tensor in tensors(model).items()}

    patch.setattr(checkpoint, "_tensors", wrong)


def resumed(patch: Patch) -> None:
    """Chance depends on how many steps this process has taken."""
    calls = iter(range(1000))
    patch.setattr(training, "combined", lambda *_: next(calls))


def uncalled(patch: Patch) -> None:
    """The layers' weights are read, and no path calls the layers."""

    def wrong(self: Any, x: Tensor) -> Tensor:
        hidden = self.activation(functional.linear(x, self.expand.weight, self.expand.bias))
        return functional.linear(hidden, self.reduce.weight, self.reduce.bias)

    patch.setattr(FeedForward, "forward", wrong)


def unhooked(patch: Patch) -> None:
    """Packed sequences go past the layer."""
    forward = FeedForward.forward

    def wrong(self: Any, x: Tensor) -> Tensor:
        if len(x) > 1:
            return forward(self, x)
        hidden = self.activation(functional.linear(x, self.expand.weight, self.expand.bias))
        return functional.linear(hidden, self.reduce.weight, self.reduce.bias)

    patch.setattr(FeedForward, "forward", wrong)


def evaluated(patch: Patch) -> None:
    encode = Transformer.encode

    def wrong(self: Any, *given: Any) -> Tensor:
        self.target.table.weight.data[5, 3] += 1e-6
        return encode(self, *given)

    patch.setattr(Transformer, "encode", wrong)


def shaken(patch: Patch) -> None:
    encode = Transformer.encode

    def wrong(self: Any, *given: Any) -> Tensor:
        torch.rand(())
        return encode(self, *given)

    patch.setattr(Transformer, "encode", wrong)


BROKEN: list[tuple[str, Callable[[Patch], None]]] = [
    ("fused = formula", fused),
    ("packed = padded", packed),
    ("cached = uncached", cached),
    ("beam 1 = greedy", beams),
    ("batch = one by one", batch),
    ("engine = eager", engine),
    ("compiled = eager", compiled),
    ("bf16 ≈ fp32", narrow),
    ("int8 ≈ fp32", eight_bits),
    ("recorded = unrecorded", recorded),
    ("exported = native", exported),
    ("loaded = saved", saved),
    ("resumed = uninterrupted", resumed),
    ("hooks fire", unhooked),
    ("hooks fire", uncalled),
    ("evaluation changes nothing", evaluated),
    ("evaluation changes nothing", shaken),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("name", "breaks"), BROKEN, ids=[one.__name__ for _, one in BROKEN])
def test_what_is_broken_is_caught(
    name: str, breaks: Callable[[Patch], None], translator: Path, monkeypatch: Patch
) -> None:
    """That they hold as they are is the command's test."""
    breaks(monkeypatch)
    broken = findings(translator, name)[name]
    if broken.status == "skipped":
        pytest.skip(broken.of)
    assert broken.status == "fails"
    assert broken.difference is not None
    assert broken.difference < float("inf") or breaks is shaken


def test_a_way_that_does_not_work_at_all(translator: Path, monkeypatch: Patch) -> None:
    def wrong(*_: object) -> None:
        raise RuntimeError("a cache\nof two lines")

    monkeypatch.setattr(Transformer, "cache", wrong)
    finding = findings(translator, "cached = uncached")["cached = uncached"]
    assert (finding.status, finding.difference) == ("fails", float("inf"))
    assert finding.of == "RuntimeError: a cache of two lines"


def test_everything_can_be_broken() -> None:
    on_a_gpu = {"captured = eager", "fused steps = plain"}
    assert {one.name for one in PROPERTIES} - on_a_gpu == {name for name, _ in BROKEN}


def _worse(normalize: Any, given: Any, more: Any) -> Any:
    out, *others = normalize(*given, **more)
    return 1.1 * out, *others


@pytest.mark.gpu
@pytest.mark.triton
@pytest.mark.usefixtures("unchecked")
def test_a_fused_kernel_that_is_broken_is_caught(translator: Path, monkeypatch: Patch) -> None:
    pytest.importorskip("triton")
    from regard.model import fused

    name = "fused steps = plain"
    names = [name, "hooks fire"]
    report = check(translator, properties=names)
    assert [finding.status for finding in report] == ["holds", "holds"]
    normalize = fused._normalized
    monkeypatch.setattr(fused, "_normalized", lambda *given, **more: _worse(normalize, given, more))
    report = check(translator, properties=names)
    assert [finding.status for finding in report] == ["fails", "holds"]


def test_the_exit_code_and_the_remedy(
    translator: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    few = [one for one in PROPERTIES if one.name in ("cached = uncached", "packed = padded")]
    monkeypatch.setattr(contract, "PROPERTIES", few)
    cached(monkeypatch)
    status, out, said = regard(capsys, "check", translator, "--device", "cpu")
    assert status == 1
    assert re.search(r"^✓ packed = padded .*\n✗ cached = uncached ", out, re.MULTILINE)
    assert re.fullmatch(r"regard: cached = uncached does not hold \(.*: please report .*\n", said)
    status, out, _ = regard(capsys, "check", translator, "--device", "cpu", "--json")
    assert (status, json.loads(out)["holds"]) == (1, False)
