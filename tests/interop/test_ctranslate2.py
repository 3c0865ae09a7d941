"""CTranslate2: its engine computes and writes what ours do, with every kind of model it has."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from regard import (
    AudioSource,
    LanguageConfig,
    LanguageModel,
    TextClassifier,
    TextSource,
    Transformer,
    checkpoint,
    load,
)
from regard.cli import main as cli
from regard.data.tokenizer import Tokenizer
from regard.data.tokenizer import files as tokenizer_files
from regard.interop import ctranslate2 as ours
from regard.interop import read, write
from regard.model.classifier import ClassifierConfig
from regard.model.transformer import TransformerConfig
from regard.task.search import SearchSettings
from regard.task.translate import preset

engine = pytest.importorskip("ctranslate2")

Capture = pytest.CaptureFixture[str]

TASK = {"name": "translate", "start": 1, "end": 2, "pad": 0}
SMALL: dict[str, Any] = {
    "width": 24,
    "heads": 6,
    "feed_forward": 29,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "length": 31,
}
SENTENCES = ["a man rides a bicycle", "two dogs run"]


def randomised(model: Any) -> Any:
    """Every number random: biases and norms too, which start at 0 and 1."""
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


def default_shape() -> dict[str, Any]:
    """What `regard train translate` makes with nothing set, but for sizes."""
    shape = preset().model
    return {"norm": shape.norm, "position": shape.position, "activation": shape.activation}


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


TRANSFORMERS: list[dict[str, Any]] = [
    default_shape(),
    {},
    {"position": "sinusoidal-halves", "activation": "silu", "scale": False},
    {"norm": "pre", "position": "learned", "activation": "gelu", "output_bias": True},
    {"norm": "pre", "position": "rotary", "activation": "swiglu", "key_heads": 2, "epsilon": 1e-3},
    {"norm": "pre", "final_norm": False, "position": "none", "key_heads": 1},
    {"share": "target", "source": TextSource(vocabulary=53), "decoder_feed_forward": 13},
    {"share": "none", "norm": "pre", "position": "rotary", "source": TextSource(vocabulary=53)},
]
LANGUAGE: list[dict[str, Any]] = [
    {},
    {"share": False, "key_heads": 2, "activation": "gelu"},
    {"position": "linear-bias"},
    {"position": "sinusoidal", "norm": "post"},
]


def names(folder: Path, side: str) -> list[str]:
    for name in (f"{side}_vocabulary.json", "shared_vocabulary.json", "vocabulary.json"):
        if (folder / name).is_file():
            return list(json.loads((folder / name).read_text()))
    raise AssertionError(folder)


def steps(result: Any) -> Tensor:
    return torch.stack([torch.from_numpy(np.array(step)).flatten() for step in result.logits[0]])


@pytest.mark.parametrize(
    "changes", [TRANSFORMERS[n] if n in (0, 1, 4, 6) else slow(TRANSFORMERS[n]) for n in range(8)]
)
def test_a_transformer_has_the_same_logits_there(changes: dict[str, Any], tmp_path: Path) -> None:
    model = randomised(Transformer(TransformerConfig(47, **SMALL | changes)))
    verified = write(model, tmp_path / "out", "ctranslate2", task=TASK)
    assert verified.difference < 1e-6 * max(10, verified.largest)
    source = torch.randint(4, 47, (11,)).tolist()
    heard, written = names(tmp_path / "out", "source"), names(tmp_path / "out", "target")
    (result,) = engine.Translator(str(tmp_path / "out"), intra_threads=1).translate_batch(
        [[heard[i] for i in source]],
        beam_size=1,
        max_decoding_length=7,
        min_decoding_length=7,
        return_logits_vocab=True,
    )
    target = [written.index(token) for token in result.hypotheses[0]]
    with torch.no_grad():
        expected = model(torch.tensor([[*source, 2]]), torch.tensor([[1, *target[:-1]]]))[0]
    found = steps(result)
    real = found > -1e30  # the end, which was forbidden
    back = read(tmp_path / "out")
    assert back.model.config == replace(model.config, length=back.model.config.length)
    with torch.no_grad():
        again = back.model(torch.tensor([[*source, 2]]), torch.tensor([[1, *target[:-1]]]))[0]
    assert (again - expected).abs().max() < 1e-6 * max(10, verified.largest)
    assert (found - expected)[real].abs().max() < 1e-6 * max(10, verified.largest)
    assert real.sum() == real.numel() - 7


@pytest.mark.parametrize("changes", [LANGUAGE[0], *map(slow, LANGUAGE[1:])])
def test_a_language_model_has_the_same_logits_there(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    shape = {"width": 24, "heads": 6, "feed_forward": 29, "layers": 2}
    model = randomised(LanguageModel(LanguageConfig(47, **shape | changes)))
    write(model, tmp_path / "out", "ctranslate2", task=TASK)
    ids = torch.randint(4, 47, (2, 13))
    tokens = [[names(tmp_path / "out", "target")[i] for i in row] for row in ids.tolist()]
    generator = engine.Generator(str(tmp_path / "out"), intra_threads=1)
    with torch.no_grad():
        found = torch.from_numpy(np.array(generator.forward_batch(tokens)))
        assert (found - model(ids)).abs().max() < 1e-5
        back = read(tmp_path / "out")
        assert (back.model(ids) - model(ids)).abs().max() < 1e-5
    assert back.task is not None
    assert [back.task[name] for name in ("name", "start", "end")] == ["language", 1, 2]


# Where a CPU has no dot products of 8-bit integers, CTranslate2's sums are rougher.
@pytest.mark.parametrize(
    ("precision", "allowed"), [("int8", 0.4), slow("bf16", 0.1), slow("fp16", 0.01)]
)
def test_narrower_weights(precision: str, allowed: float, tmp_path: Path) -> None:
    model = randomised(Transformer(TransformerConfig(47, **SMALL | default_shape())))
    sizes = []
    for name in ("fp32", precision):
        verified = write(model, tmp_path / name, "ctranslate2", task=TASK, precision=name)
        sizes.append((tmp_path / name / "model.bin").stat().st_size)
    assert 1e-7 < verified.difference < allowed * verified.largest
    assert sizes[1] < 0.7 * sizes[0]
    back, (ids, target) = read(tmp_path / precision), torch.randint(4, 47, (2, 3, 7))
    with torch.no_grad():
        found, expected = back.model(ids, target), model(ids, target)
    assert 1e-7 < (found - expected).abs().max() < allowed * expected.abs().max()


# From texts to texts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A translator of real words that was not trained, but is sure of what it writes."""
    torch.manual_seed(0)
    tokenizer = Tokenizer.bpe(SENTENCES * 2, 300)
    model = Transformer(TransformerConfig(tokenizer.size, **SMALL | default_shape()))
    randomised(model)
    with torch.no_grad():
        model.decoder.norm.weight.mul_(10.0)
    settings = SearchSettings.of(tokenizer, beams=1, length=41)
    path = tmp_path_factory.mktemp("runs") / "model"
    checkpoint.save(
        path,
        model,
        files=tokenizer_files(tokenizer, tokenizer),
        task={"name": "translate", **vars(settings), "banned": list(settings.banned)},
    )
    return path


def regard(capsys: Capture, *words: object) -> tuple[int, str, str]:
    status = cli.main([str(word) for word in words])
    said = capsys.readouterr()
    return status, said.out, said.err


def test_the_card_translates_as_we_do(
    folder: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, out, said = regard(capsys, "export", folder, tmp_path / "out", "--to", "ctranslate2")
    assert (status, said) == (0, "")
    assert re.search(r"out: in CTranslate2, the largest difference .* is \d", out)
    (code,) = re.findall(r"```python\n(.*?)```", (tmp_path / "out" / "README.md").read_text(), re.S)
    monkeypatch.chdir(tmp_path)
    for sentence, wanted in zip(SENTENCES, load(folder).translate(SENTENCES)):
        exec(code.replace("…", sentence), {})
        assert capsys.readouterr().out.strip() == wanted.strip()


@pytest.mark.slow
def test_int8_by_the_command(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    words = ("export", folder, tmp_path / "out", "--to", "ctranslate2", "--precision", "int8")
    status, out, said = regard(capsys, *words)
    assert (status, said) == (0, "")
    assert "the arg-max is the same at" in out


@pytest.mark.slow
def test_there_and_back_by_the_commands(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    regard(capsys, "export", folder, tmp_path / "out", "--to", "ctranslate2")
    status, _, said = regard(capsys, "import", tmp_path / "out", tmp_path / "back")
    assert (status, said) == (0, "")
    native, back = load(folder), load(tmp_path / "back")
    for found, wanted in zip(back.translate(SENTENCES, beams=1), native.translate(SENTENCES)):
        assert found.startswith(wanted[:40])  # it may be longer: the limit is the engine's


@pytest.mark.slow
def test_what_another_converter_made(tmp_path: Path) -> None:
    """A Marian model, which starts from zero, by the package's own converter."""
    transformers = pytest.importorskip("transformers")
    from ctranslate2.converters.transformers import MarianMTLoader

    config = transformers.MarianConfig(
        vocab_size=47,
        d_model=24,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=3,
        decoder_attention_heads=3,
        encoder_ffn_dim=29,
        decoder_ffn_dim=17,
        max_position_embeddings=31,
        pad_token_id=46,
        decoder_start_token_id=46,
        eos_token_id=0,
        activation_function="swish",
        scale_embedding=True,
    )
    theirs = randomised(transformers.MarianMTModel(config))
    theirs.model.encoder.embed_positions.weight.data = (
        theirs.model.encoder.embed_positions.create_weight()
    )
    theirs.model.decoder.embed_positions.weight.data = (
        theirs.model.encoder.embed_positions.weight.clone()
    )
    with torch.no_grad():
        theirs.model.shared.weight[46] = 0
        spec = MarianMTLoader().get_model_spec(theirs)
    tokens = [f"t{n}" for n in range(46)]
    spec.register_source_vocabulary(tokens)
    spec.register_target_vocabulary(tokens)
    spec.config.eos_token = spec.config.decoder_start_token = "t0"
    spec.config.unk_token = "t1"
    spec.validate()
    spec.optimize(quantization="float32")
    spec.save(str(tmp_path))
    back = read(tmp_path)
    assert back.task is not None
    assert [back.task[name] for name in ("start", "end", "pad")] == [46, 0, 46]
    source, target = torch.randint(1, 46, (3, 7)), torch.randint(1, 46, (3, 5))
    target[:, 0] = 46
    with torch.no_grad():
        expected = theirs(source, decoder_input_ids=target).logits
        found = back.model(source, target)
    assert (found - expected)[..., :46].abs().max() < 1e-5 * expected.abs().max()


# What is refused


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda content: content[:1000], "ends after 1,000 bytes"),
        (lambda content: b"\x09" + content[1:], "version 9; known are 5 and 6"),
        (lambda content: content.replace(b"TransformerSpec", b"TransformerSpeq"), "Speq; known"),
        (lambda content: content.replace(b"ffn/layer_norm/beta", b"ffn/layer_norm/bate"), "bate"),
        (lambda content: content.replace(b"decoder/alibi\0", b"decoder/alibo\0"), "alibo"),
    ],
)
def test_a_model_bin_that_is_not_one(damage: Any, said: str, tmp_path: Path) -> None:
    model = randomised(Transformer(TransformerConfig(47, **SMALL)))
    write(model, tmp_path / "out", "ctranslate2", task=TASK)
    path = tmp_path / "out" / "model.bin"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=said):
        read(tmp_path / "out")


def test_an_export_that_computes_something_else_is_never_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give = ours.give

    def damaged(model: nn.Module, pairs: Any) -> dict[str, Tensor]:
        tensors = give(model, pairs)
        name = "decoder/layer_1/attention/linear_1/weight"
        return tensors | {name: tensors[name].roll(1, 0)}

    monkeypatch.setattr(ours, "give", damaged)
    model = randomised(Transformer(TransformerConfig(47, **SMALL | default_shape())))
    for precision in ("fp32", "int8"):
        with pytest.raises(ValueError, match="computes something else"):
            write(model, tmp_path / "out", "ctranslate2", task=TASK, precision=precision)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"position": "linear-bias"}, "--model.position rotary can be exported"),
        ({"final_norm": True}, "--model.final-norm False can be exported"),
        ({"window": 5}, "--model.window None can be exported"),
        ({"mixer": "lstm"}, "--model.mixer attention can be exported"),
        ({"source": AudioSource()}, "its source is text, not audio$"),
    ],
)
def test_what_it_has_no_place_for(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        write(
            Transformer(TransformerConfig(47, **SMALL | changes)), tmp_path / "out", "ctranslate2"
        )


def test_other_refusals(tmp_path: Path) -> None:
    def refused(said: str, model: nn.Module, **options: Any) -> None:
        with pytest.raises(ValueError, match=said):
            write(model, tmp_path / "out", "ctranslate2", **options)

    refused("no TextClassifier.*--to onnx", TextClassifier(ClassifierConfig.tiny(3, 47)))
    config = TransformerConfig(47, **SMALL)
    own = Transformer(config, feed_forward=lambda: nn.Linear(24, 24))
    refused(r"encoder\.blocks\.0\.feed_forward is a Linear, which its writer", own)
    refused(r"end \(47\) must be an id", Transformer(config), task=TASK | {"end": 47})
    refused(r"precision \('int4'\) must be one of", Transformer(config), precision="int4")


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ctranslate2", None)
    with pytest.raises(ValueError, match=r"needs its package: .*pip install .*\[export\]'"):
        write(Transformer(TransformerConfig(47, **SMALL)), tmp_path / "out", "ctranslate2")
