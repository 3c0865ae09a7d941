"""ONNX and torch.export: programs that run elsewhere compute what our models do."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard import (
    AudioSource,
    ImageSource,
    LanguageConfig,
    LanguageModel,
    TextClassifier,
    TextSource,
    Transformer,
    VisionTransformer,
    checkpoint,
    load,
)
from regard.cli import main as cli
from regard.data.tokenizer import Tokenizer
from regard.data.tokenizer import files as tokenizer_files
from regard.interop import onnx, torch_export, write
from regard.interop.programs import AnyModel, programs, verified
from regard.model.classifier import ClassifierConfig
from regard.model.encoder import EncoderConfig, TextEncoder
from regard.model.transformer import TransformerConfig
from regard.model.vit import VisionConfig
from regard.task.search import SearchSettings
from regard.task.translate import preset

Capture = pytest.CaptureFixture[str]

WIDE: dict[str, Any] = {"width": 24, "heads": 6, "feed_forward": 29}
SMALL = WIDE | {"encoder_layers": 2, "decoder_layers": 3, "length": 31}
ROTARY: dict[str, Any] = {"norm": "pre", "position": "rotary"}
SENTENCES = """a man in a red shirt rides a bicycle
two dogs run through the green grass""".splitlines()


def randomised(model: Any) -> Any:
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


MODELS: dict[str, Any] = {
    "default": lambda: Transformer(TransformerConfig(47, **SMALL | ROTARY)),
    "paper": lambda: Transformer(TransformerConfig(47, **SMALL)),
    "learned": lambda: Transformer(
        TransformerConfig(47, **SMALL, position="learned", output_bias=True, scale=False)
    ),
    "alibi": lambda: Transformer(TransformerConfig(47, **SMALL, position="linear-bias")),
    "grouped": lambda: Transformer(
        TransformerConfig(47, **SMALL | ROTARY, key_heads=2, activation="swiglu", epsilon=1e-3)
    ),
    "apart": lambda: Transformer(
        TransformerConfig(47, **SMALL, share="target", source=TextSource(vocabulary=53))
    ),
    "images": lambda: Transformer(
        TransformerConfig(47, **SMALL | ROTARY, source=ImageSource(image=(8, 12), patch=4))
    ),
    "sinusoids": lambda: Transformer(
        TransformerConfig(
            47, **SMALL, source=ImageSource(image=8, patch=4, channels=1, position="sinusoidal")
        )
    ),
    "audio": lambda: Transformer(TransformerConfig(47, **SMALL, source=AudioSource(features=7))),
    "language": lambda: LanguageModel(LanguageConfig(47, **WIDE, layers=2)),
    "language, alibi": lambda: LanguageModel(
        LanguageConfig(47, **WIDE, layers=2, position="linear-bias", share=False)
    ),
    "label": lambda: TextClassifier(ClassifierConfig(5, 47, **WIDE, layers=2)),
    "label, last": lambda: TextClassifier(
        ClassifierConfig(5, 47, **WIDE | ROTARY, layers=2, pool="last")
    ),
    "encoder": lambda: TextEncoder(EncoderConfig(47, **WIDE | ROTARY, layers=2)),
    "vit": lambda: VisionTransformer(VisionConfig(7, (8, 12), 4, **WIDE, layers=2)),
    "vit, mean": lambda: VisionTransformer(
        VisionConfig(7, 8, 4, **WIDE, layers=2, pool="mean", pool_norm=True, position="sinusoidal")
    ),
    "vit, both": lambda: VisionTransformer(
        VisionConfig(7, 8, 4, **WIDE, layers=1, pool="mean", class_token=True, head_width=11)
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_equations_are_the_models(name: str) -> None:
    model: AnyModel = randomised(MODELS[name]())
    modules = {program.name: program.module for program in programs(model)}

    def run(name: str, inputs: Any) -> list[Tensor]:
        results = modules[name](**inputs)
        return [results] if isinstance(results, Tensor) else list(results)

    found = verified(model, run, "eager")
    assert found.difference < 1e-6 * max(10, found.largest)
    assert found.logits >= 35


@pytest.mark.parametrize("part", ["key", "value", "output"])
def test_a_wrong_weight_is_noticed(part: str) -> None:
    model = randomised(MODELS["default"]())
    modules = {program.name: program.module for program in programs(model)}
    other = randomised(MODELS["default"]())
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        getattr(other.decoder.blocks[1].cross, part).weight[0].neg_()

    def run(name: str, inputs: Any) -> list[Tensor]:
        results = modules[name](**inputs)
        return [results] if isinstance(results, Tensor) else list(results)

    with pytest.raises(ValueError, match="computes something else"):
        verified(other, run, "eager")


def test_a_text_without_tokens_is_no_nan() -> None:
    """A row that may attend to nothing is zero there as well."""
    model = randomised(MODELS["default"]())
    encoder, decoder = (program.module for program in programs(model))
    ids, lengths = torch.randint(47, (2, 5)), torch.tensor([0, 5])
    target = torch.randint(47, (2, 3))
    memory = encoder(ids, lengths)
    with torch.no_grad():
        past = torch.zeros(3, 2, 2, 6, 0, 4)
        found, _ = decoder(target, past, memory, lengths)
        expected = model(ids, target, source_lengths=lengths)
    assert (found - expected).abs().max() < 1e-5


# In their own engines


def save_translator(folder: Path) -> None:
    tokenizer = Tokenizer.bpe(SENTENCES * 2, 300)
    shape = preset().model
    kind = {"norm": shape.norm, "position": shape.position, "activation": shape.activation}
    small = WIDE | {"encoder_layers": 1, "decoder_layers": 1}
    model = randomised(Transformer(TransformerConfig(tokenizer.size, **small | kind)))
    settings = SearchSettings.of(tokenizer, beams=1, length=67)
    checkpoint.save(
        folder,
        model,
        files=tokenizer_files(tokenizer, tokenizer),
        task={"name": "translate", **vars(settings), "banned": list(settings.banned)},
    )


def regard(capsys: Capture, *words: object) -> tuple[int, str, str]:
    status = cli.main([str(word) for word in words])
    said = capsys.readouterr()
    return status, said.out, said.err


@pytest.mark.slow
def test_the_card_translates_in_onnxruntime_as_we_do(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of the kind that training makes with nothing set."""
    pytest.importorskip("onnxruntime")
    save_translator(tmp_path / "model")
    status, out, said = regard(capsys, "export", tmp_path / "model", tmp_path / "out", "--to=onnx")
    assert (status, said) == (0, "")
    assert re.search(r"out: in onnxruntime, the largest difference .* is \d", out)
    (code,) = re.findall(r"```python\n(.*?)```", (tmp_path / "out" / "README.md").read_text(), re.S)
    monkeypatch.chdir(tmp_path)
    native = load(tmp_path / "model")
    for sentence in SENTENCES:
        exec(code.replace("…", sentence), {})
        found, expected = capsys.readouterr().out.strip(), native.translate([sentence])[0].strip()
        assert found.startswith(expected)  # which ends sooner: a model of noise never does
        assert len(expected) > 20


@pytest.mark.parametrize("kind", [pytest.param("onnx", marks=pytest.mark.slow), "torch-export"])
def test_a_vit_elsewhere(kind: str, tmp_path: Path, capsys: Capture) -> None:
    if kind == "onnx":
        pytest.importorskip("onnxruntime")
    found = write(randomised(MODELS["vit, both"]()), tmp_path / "out", kind)
    assert found.difference < 1e-6 * max(10, found.largest)
    (code,) = re.findall(r"```python\n(.*?)```", (tmp_path / "out" / "README.md").read_text(), re.S)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        exec(code, {})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["onnx", "torch-export"])
@pytest.mark.parametrize("name", [name for name in MODELS if name != "vit, both"])
def test_every_model_elsewhere(name: str, kind: str, tmp_path: Path) -> None:
    if kind == "onnx":
        pytest.importorskip("onnxruntime")
    found = write(randomised(MODELS[name]()), tmp_path / "out", kind)
    assert found.difference < 1e-6 * max(10, found.largest)
    code = re.findall(r"```python\n(.*?)```", (tmp_path / "out" / "README.md").read_text(), re.S)[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        exec(code, {})


# What is refused


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for format, name in ((onnx, "ONNX"), (torch_export, "torch.export")):
        with pytest.raises(ValueError, match=f"{name} has no Linear"):
            format.write(nn.Linear(3, 5), tmp_path / "out", files={}, task=None)
        own = Transformer(TransformerConfig(47, **SMALL), feed_forward=lambda: nn.Linear(24, 24))
        with pytest.raises(
            ValueError, match=f"{name} has no such model: encoder.blocks.0.feed_forward is a Linear"
        ):
            format.write(own, tmp_path / "out", files={}, task=None)
        near = Transformer(TransformerConfig(47, **SMALL, window=3))
        with pytest.raises(ValueError, match=r"no window.*--model\.window None can be exported"):
            format.write(near, tmp_path / "out", files={}, task=None)
    with pytest.raises(ValueError, match=r"precision \('int8'\) is for CTranslate2"):
        write(own, tmp_path / "out", "onnx", precision="int8")
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    with pytest.raises(ValueError, match=r"needs onnxruntime: .*pip install .*\[export\]'"):
        write(MODELS["vit"](), tmp_path / "out", "onnx")
    assert not list(tmp_path.iterdir())
