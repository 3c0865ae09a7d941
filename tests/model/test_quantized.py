"""Weights of 8 bits, in memory and in a folder."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from regard import checkpoint
from regard.cli.main import main
from regard.decode.engine.int8.linear import Int8Linear, int8
from regard.model.quantized import QuantizedLinear, dequantize, quantize, round_rows
from regard.model.transformer import Transformer, TransformerConfig
from regard.model.vit import VisionTransformer
from regard.task.load import load

pytestmark = pytest.mark.filterwarnings("ignore:8-bit layers run through torch")

CONFIG = replace(
    TransformerConfig.tiny(37),
    width=16,
    heads=2,
    feed_forward=17,
    encoder_layers=1,
    decoder_layers=2,
)
TASK = {"name": "translate", "start": 0, "end": 1, "pad": 0}


def saved(folder: Path, share: str = "all", dtype: torch.dtype = torch.float32) -> Transformer:
    torch.manual_seed(3)
    model = Transformer(replace(CONFIG, share=share)).to(dtype).eval()
    checkpoint.save(folder, model, files={"tokenizer.json": b"{}"}, task=TASK)
    return model


def test_a_layer_computes_with_its_dequantized_weights() -> None:
    linear, x = nn.Linear(13, 7), torch.randn(3, 5, 13)
    layer = QuantizedLinear(linear)
    integers, scale = round_rows(linear.weight.detach())
    assert torch.equal(layer.integers, integers)
    want = x @ dequantize(integers, scale).T + linear.bias
    torch.testing.assert_close(layer(x), want)
    assert (layer(x) - linear(x)).norm() / linear(x).norm() < 0.01
    assert QuantizedLinear(nn.Linear(13, 7, bias=False))(x).shape == (3, 5, 7)


@pytest.mark.parametrize("share", ["all", "none"])
def test_a_folder_gives_back_the_integers(tmp_path: Path, share: str) -> None:
    model = saved(tmp_path / "run", share)
    assert main(["quantize", str(tmp_path / "run"), str(tmp_path / "small")]) == 0
    kept = checkpoint.load(tmp_path / "small", keep_int8=True)
    direct = quantize(model)
    for name, value in kept.model.state_dict().items():
        assert torch.equal(value, direct.state_dict()[name]), name
    assert kept.files["tokenizer.json"].read_bytes() == b"{}"
    assert kept.task == TASK
    ids = torch.randint(0, 37, (2, 5))
    assert torch.equal(kept.model(ids, ids), direct(ids, ids))
    # And the same kernels' layers come from either.
    assert torch.equal(int8(kept.model)(ids, ids), int8(saved(tmp_path / "run", share))(ids, ids))


@pytest.mark.parametrize("share", ["all", "none"])
def test_widened_it_is_a_model_like_any_other(tmp_path: Path, share: str) -> None:
    model = saved(tmp_path / "run", share)
    main(["quantize", str(tmp_path / "run"), str(tmp_path / "small")])
    wide = checkpoint.load(tmp_path / "small").model
    assert not any(isinstance(part, QuantizedLinear) for part in wide.modules())
    assert {name for name, _ in wide.named_parameters()} == {
        name for name, _ in model.named_parameters()
    }
    # A table that embeds as well was never round_rows.
    assert (share == "all") == torch.equal(wide.output.weight, model.output.weight)
    ids = torch.randint(0, 37, (2, 5))
    assert (wide(ids, ids) - model(ids, ids)).norm() / model(ids, ids).norm() < 0.03
    # It can be trained and saved.
    wide.train()(ids, ids).sum().backward()
    checkpoint.save(tmp_path / "again", wide, task=TASK)
    assert torch.equal(checkpoint.load(tmp_path / "again").model.output.weight, wide.output.weight)


def test_an_image_classifier(tmp_path: Path) -> None:
    model = VisionTransformer.tiny(5, image=8, patch=4).eval()
    nn.init.normal_(model.head.output.weight)  # it begins at zero
    checkpoint.save(tmp_path / "run", model)
    assert main(["quantize", str(tmp_path / "run"), str(tmp_path / "small")]) == 0
    x = torch.randn(3, 3, 8, 8)
    kept = checkpoint.load(tmp_path / "small", keep_int8=True).model
    assert (kept(x) - model(x)).norm() / model(x).norm() < 0.05
    size = (tmp_path / "small/model.safetensors").stat().st_size
    assert size < 0.3 * (tmp_path / "run/model.safetensors").stat().st_size


def test_weights_saved_in_bf16(tmp_path: Path) -> None:
    saved(tmp_path / "run", dtype=torch.bfloat16)
    assert main(["quantize", str(tmp_path / "run"), str(tmp_path / "small")]) == 0
    kept = checkpoint.load(tmp_path / "small", keep_int8=True).model
    assert kept.target.table.weight.dtype == torch.float32


def test_what_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path / "run")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("mine")
    for words, said in (
        ([tmp_path / "none", tmp_path / "out"], "does not exist"),
        ([tmp_path / "run", tmp_path / "mine"], "exists and is not an empty folder"),
    ):
        assert main(["quantize", *map(str, words)]) == 2
        assert said in capsys.readouterr().err
    assert (tmp_path / "mine/notes.txt").read_text() == "mine"
    with pytest.raises(ValueError, match=r"cannot be trained; call model.eval\(\) first"):
        quantize(Transformer(CONFIG))
    with pytest.raises(ValueError, match="cannot be trained"):
        quantize(Transformer(CONFIG).eval()).train()


def test_load_keeps_them_on_a_cpu_unless_a_dtype_is_given(tmp_path: Path) -> None:
    saved(tmp_path / "run")
    main(["quantize", str(tmp_path / "run"), str(tmp_path / "small")])
    assert isinstance(load(tmp_path / "small").model.output, Int8Linear)
    wide = load(tmp_path / "small", dtype=torch.float32).model
    assert type(wide.output) is nn.Linear
