"""A folder records the custom parts of its model, and a load without them is refused by name."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import (
    LanguageConfig,
    LanguageModel,
    MultiHeadAttention,
    RotaryEmbedding,
    SinusoidalPositions,
    TextClassifier,
    TextEncoder,
    Transformer,
    TransformerConfig,
    VisionConfig,
    VisionTransformer,
)
from regard.attention.core import Core
from regard.attention.mask import Mask
from regard.checkpoint import CONFIG, custom_parts, load, save
from regard.model.baseline import Convolution
from regard.model.block import Block, FeedForward
from regard.model.classifier import ClassifierConfig
from regard.model.encoder import EncoderConfig
from regard.model.quantized import quantize
from regard.model.transformer import TransformerShape

SIZES: dict[str, Any] = {"width": 12, "heads": 3, "feed_forward": 17}
CONFIG_LM = LanguageConfig(11, layers=2, **SIZES)
TOKENS = torch.tensor([[3, 7, 5, 2, 9]])


class Dilated(MultiHeadAttention):
    """Attention to every second position."""

    def forward(self, x: Tensor, source: Tensor | None = None, **options: Any) -> Tensor:
        every_second = Mask(lambda at: (at.query - at.key) % 2 == 0, "dilated")
        mask = options.pop("mask") & every_second
        return super().forward(x, source, mask=mask, **options)


class Sigmoid(Core):
    def forward(self, query, key, value, mask=None, bias=None):  # type: ignore[no-untyped-def]
        L, S = query.shape[-2], key.shape[-2]
        allowed = torch.ones(L, S, dtype=torch.bool).tril(S - L)
        return (query @ key.mT).sigmoid().where(allowed, 0) @ value


class Parallel(Block):
    def forward(self, x, memory=None, *, mask=None, cache=None, **options):  # type: ignore[no-untyped-def]
        own = None if cache is None else cache.own
        return x + self.attention(x, mask=mask, cache=own) + self.feed_forward(x)


def with_attention(cls: type[MultiHeadAttention], **options: Any) -> LanguageModel:
    make = lambda position: cls(12, 3, position=position, **options)  # noqa: E731
    return LanguageModel(CONFIG_LM, attention=make)


def with_sigmoid() -> LanguageModel:
    model = LanguageModel(CONFIG_LM)
    for block in model.decoder.blocks:
        block.attention.core = Sigmoid()
    return model


def with_parallel_blocks() -> LanguageModel:
    model = LanguageModel(CONFIG_LM)
    for block in model.decoder.blocks:
        block.__class__ = Parallel
    return model


def with_another_forward() -> LanguageModel:
    model = LanguageModel(CONFIG_LM)
    model.decoder.blocks[1].feed_forward.forward = lambda x: -x
    return model


CUSTOM: dict[str, tuple[Callable[[], LanguageModel], str]] = {
    "mask": (lambda: with_attention(Dilated), "decoder.blocks.0.attention is Dilated(12, heads=3"),
    "sigmoid": (with_sigmoid, "decoder.blocks.0.attention.core is Sigmoid("),
    "parallel": (with_parallel_blocks, "decoder.blocks.0 is Parallel("),
    "rotary": (
        lambda: LanguageModel(CONFIG_LM, position=lambda: RotaryEmbedding(4, base=500)),
        "decoder.blocks.0.attention.position is RotaryEmbedding(4, base=500",
    ),
    "beta": (
        lambda: with_attention(MultiHeadAttention, beta=2.0),
        "decoder.blocks.0.attention.core is Core(beta=2.0",
    ),
    "forward": (
        with_another_forward,
        "decoder.blocks.1.feed_forward is GatedFeedForward() with another forward",
    ),
}
"""Models whose weights have the names and shapes of the plain model's."""


def plain() -> LanguageModel:
    return LanguageModel(CONFIG_LM)


@pytest.mark.parametrize(("make", "name"), CUSTOM.values(), ids=CUSTOM)
def test_custom_parts_are_needed_to_load(
    make: Callable[[], LanguageModel], name: str, tmp_path: Path
) -> None:
    model = make().eval()
    save(tmp_path / "own", model)
    save(tmp_path / "plain", plain())
    with pytest.raises(ValueError, match=re.escape(name)) as error:
        load(tmp_path / "own")
    assert "pass a model that has them: load(folder, model=…)" in str(error.value)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=r"is not the one saved in .* instead of"):
        load(tmp_path / "own", model=plain())
    with pytest.raises(ValueError, match=re.escape(name) + ".* instead of what its config names"):
        load(tmp_path / "plain", model=make())
    loaded = load(tmp_path / "own", model=make()).model
    assert torch.equal(loaded(TOKENS), model(TOKENS))
    assert "model=…" in (tmp_path / "own" / "README.md").read_text()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Transformer(TransformerConfig(11, encoder_layers=1, decoder_layers=1, **SIZES)),
        lambda: LanguageModel(CONFIG_LM),
        lambda: TextEncoder(EncoderConfig(11, layers=1, **SIZES)),
        lambda: TextClassifier(ClassifierConfig(5, 11, layers=1, **SIZES)),
        lambda: VisionTransformer(VisionConfig(5, image=6, patch=3, layers=1, **SIZES)),
        lambda: quantize(plain().eval()),
        lambda: TextClassifier.of(TextEncoder(EncoderConfig(11, layers=1, **SIZES)), 5),
    ],
)
def test_a_plain_model_has_no_custom_parts(make: Callable[[], nn.Module]) -> None:
    assert custom_parts(make()) == {}


def changed(change: Callable[[Any], object]) -> Any:
    model = Transformer(TransformerConfig(11, encoder_layers=1, decoder_layers=1, **SIZES))
    change(model)
    return custom_parts(model)


def test_settings_that_change_results_are_custom_parts() -> None:
    block = "encoder.blocks.0"
    table: list[tuple[Callable[[Any], object], str, str]] = [
        (lambda m: setattr(m.source, "scale", 1.0), "source", "Tokens(scale=1)"),
        (
            lambda m: setattr(m.source, "position", SinusoidalPositions(12, base=50)),
            "source.position",
            "SinusoidalPositions(12, base=50, layout='interleaved')",
        ),
        (
            lambda m: setattr(m.encoder.blocks[0].add_attention.norm, "eps", 0.1),
            f"{block}.add_attention.norm",
            "LayerNorm(normalized_shape=(12,), eps=0.1, elementwise_affine=True)",
        ),
        (
            lambda m: setattr(m.encoder.blocks[0].attention.core, "dropout", 0.3),
            f"{block}.attention.core",
            "Core(beta=None, dropout=0.3)",
        ),
        (lambda m: setattr(m.encoder, "norm", nn.Identity()), "encoder.norm", "Identity()"),
        (lambda m: m.encoder.blocks.pop(0), block, "absent"),
    ]
    for change, name, text in table:
        parts = changed(change)
        assert parts[name] == text
        assert set(parts) == {n for n in parts if n.startswith(name)}
    assert changed(lambda m: m.output.register_forward_hook(lambda *_: None)) == {}


def test_activations_and_convolutions_are_told_apart() -> None:
    texts = [repr(FeedForward(3, 5, activation)) for activation in (F.relu, F.silu, nn.ReLU())]
    texts += [repr(Convolution(3, 5, causal=causal)) for causal in (False, True)]
    assert len(set(texts)) == 5


def test_a_config_that_only_custom_parts_fit_is_saved(tmp_path: Path) -> None:
    config = LanguageConfig(11, layers=1, width=13, heads=3, position="none", feed_forward=17)
    make = lambda: LanguageModel(config, attention=lambda position: Dilated(13, 1))  # noqa: E731
    save(tmp_path / "own", make())
    with pytest.raises(ValueError, match="parts that its config does not name"):
        load(tmp_path / "own")
    load(tmp_path / "own", model=make())


def test_a_folder_that_records_no_parts_is_loaded(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from regard.checkpoint import WEIGHTS, _sha256

    save(tmp_path / "old", with_sigmoid())
    path = tmp_path / "old" / WEIGHTS
    data = json.loads((tmp_path / "old" / CONFIG).read_text())
    parts = data.pop("parts")
    (tmp_path / "old" / CONFIG).write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"config\.json has changed .*parts"):
        load(tmp_path / "old", model=with_sigmoid())
    about = {name: data[name] for name in ("kind", "model", "task")}
    save_file(load_file(path), path, {"regard": json.dumps(about)})
    data["files"][WEIGHTS] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    (tmp_path / "old" / CONFIG).write_text(json.dumps(data))
    load(tmp_path / "old")
    load(tmp_path / "old", model=with_sigmoid())
    assert parts["decoder.blocks.0.attention.core"].startswith("Sigmoid(")


def test_a_subclass_of_a_model_is_a_custom_part(tmp_path: Path) -> None:
    class Mine(LanguageModel):
        pass

    save(tmp_path / "mine", Mine(CONFIG_LM))
    save(tmp_path / "plain", plain())
    with pytest.raises(ValueError, match=r"the model is what its config names instead of Mine\(\)"):
        load(tmp_path / "mine", model=plain())
    with pytest.raises(ValueError, match=r"the model is Mine\(\) instead of"):
        load(tmp_path / "plain", model=Mine(CONFIG_LM))
    load(tmp_path / "mine", model=Mine(CONFIG_LM))


def test_a_transformer_of_an_encoder_with_custom_parts_is_refused() -> None:
    config = EncoderConfig(11, layers=1, **SIZES)
    shape = TransformerShape(decoder_layers=1)
    assert custom_parts(Transformer.of(TextEncoder(config), shape)) == {}
    custom = TextEncoder(config, position=lambda: SinusoidalPositions(12, base=50))
    with pytest.raises(
        ValueError, match=r"would lack its custom parts \(position is SinusoidalPositions"
    ):
        Transformer.of(custom, shape)
