"""What layers and models cost: the formula is what is counted, in kernels of every kind."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from regard import (
    ImageSource,
    LanguageConfig,
    MultiHeadAttention,
    Transformer,
    TransformerConfig,
    VisionConfig,
    attend,
    causal,
    checkpoint,
    packed,
    window,
)
from regard.cli import main as cli
from regard.lab.commands.cost import named, parser
from regard.lab.cost import LAYERS, Counter, Sizes, counted, measure, model_cost
from regard.lab.cost.documents import crossovers, short
from regard.lab.cost.layers import Layer, layer, pairs_in_window
from regard.lab.cost.path import cached_numbers, felt
from regard.lab.cost.show import model_page
from regard.model.classifier import ClassifierConfig
from regard.model.encoder import EncoderConfig
from regard.model.formula import Config, model_formula

# The counter's own functions run at every operator, and checking them took most of the time.
pytestmark = pytest.mark.usefixtures("unchecked")

PRIMES = Sizes(length=13, width=21, kernel=5, heads=7, window=3, batch=2)
EXACT = [each for each in LAYERS if each.name != "attention in a window"]


def name(each: object) -> str:
    return each.name if isinstance(each, Layer) else str(each)


# Layers


@pytest.mark.parametrize("each", EXACT, ids=name)
@pytest.mark.parametrize("sizes", [PRIMES, Sizes(1, 5, 1, 1), Sizes(11, 3, 4, 1)])
def test_a_layers_formula_is_what_is_counted(each: Layer, sizes: Sizes) -> None:
    cost, found = each.cost(sizes), measure(each, sizes)
    assert found is not None
    assert found.parameters == cost.parameters
    assert found.multiply_adds == cost.multiply_adds
    assert found.additions == cost.additions
    assert found.steps == cost.steps
    assert found.path == cost.path


def test_without_memory_the_count_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    real = {each.name: measure(each, PRIMES) for each in LAYERS}
    monkeypatch.setattr("regard.lab.cost.layers.LITTLE", 0)
    for each in LAYERS:
        assert measure(each, PRIMES) == real[each.name]


def test_a_dense_layer_larger_than_any_memory_is_counted() -> None:
    each, sizes = layer("dense over all positions"), Sizes(length=4096, width=512)
    found = measure(each, sizes)
    assert found is not None
    assert found.multiply_adds == found.parameters - 4096 * 512 == (4096 * 512) ** 2


def test_what_would_take_long_is_not_run() -> None:
    assert measure(layer("LSTM"), Sizes(length=10_000)) is None


def test_a_window_costs_the_pairs_it_allows_and_rectangles_around_them() -> None:
    for n, w in ((17, 3), (5, 7), (1, 1)):
        assert int(window(w).tensor(n, n).sum()) == pairs_in_window(n, w)
    each = layer("attention in a window")
    for n in (16, 256):
        sizes = Sizes(length=n, width=6, heads=3, window=5)
        found = measure(each, sizes)
        assert found is not None
        whole = layer("attention alone").cost(sizes).multiply_adds
        assert each.cost(sizes).multiply_adds <= found.multiply_adds <= whole
    assert found.multiply_adds < 0.6 * whole
    assert found.path == each.cost(sizes).path


def test_convolutions_that_reach_nowhere_have_no_path() -> None:
    found = measure(layer("convolution"), Sizes(length=7, width=2, kernel=1, heads=1))
    assert found is not None
    assert found.path is None


def test_what_attention_keeps_for_the_next_position() -> None:
    made = MultiHeadAttention(6, 3)
    sizes = Sizes(length=11, width=6, heads=3)
    cost = layer("attention, with projections").cost(sizes)
    assert cached_numbers(made, 11, 6) == cost.cache


def test_what_fused_attention_keeps_for_the_backward_pass() -> None:
    found = measure(layer("attention, with projections"), Sizes(length=11, width=6, heads=3))
    assert found is not None
    # Its input, queries, keys and values, the output, and one number for each row's softmax.
    assert found.activations == 5 * 11 * 6 + 3 * 11


def test_gradients_reach_as_far_as_a_window() -> None:
    at = torch.zeros(9, dtype=torch.bool)
    at[4] = True

    def near(x: Tensor) -> Tensor:
        return attend(x, x, x, mask=window(2))

    assert felt(near, at, 3).nonzero().flatten().tolist() == [2, 3, 4, 5, 6]


def test_heads_divide_the_width() -> None:
    with pytest.raises(ValueError, match=r"heads \(3\) must divide width \(8\)"):
        Sizes(width=8, heads=3)


# The counter


def heads(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def test_fused_kernels_are_counted() -> None:
    x = heads(2, 3, 7, 5)
    with torch.no_grad(), FlopCounterMode(display=False) as theirs:
        F.scaled_dot_product_attention(x, x, x)
    with torch.no_grad():
        ours = counted(lambda: F.scaled_dot_product_attention(x, x, x))
    assert ours.total.multiply_adds == 2 * 2 * 3 * 7 * 7 * 5
    # Torch's own counter overlooks this kernel in some versions.
    assert theirs.get_total_flops() in (0, 2 * ours.total.multiply_adds)


@pytest.mark.parametrize("backend", ["formula", "sdpa", "auto"])
@pytest.mark.parametrize("grouped", [False, True])
def test_every_backend_costs_the_same(backend: str, grouped: bool) -> None:
    query, key = heads(2, 6, 7, 5), heads(2, 3 if grouped else 6, 11, 5)
    with torch.no_grad():
        found = counted(lambda: attend(query, key, key, mask=causal(), backend=backend))
    assert found.total.multiply_adds == 2 * 2 * 6 * 7 * 11 * 5
    assert found.chain == 2


def test_packed_sequences_cost_their_own_pairs() -> None:
    x = heads(1, 3, 12, 5)
    with torch.no_grad():
        found = counted(lambda: attend(x, x, x, mask=packed([5, 7]), backend="packed"))
    assert found.total.multiply_adds >= 2 * 3 * (5 * 5 + 7 * 7) * 5
    assert found.total.multiply_adds < 2 * 3 * 12 * 12 * 5


def test_backwards() -> None:
    """Two products of matrices for each; fused attention computes its scores once more."""
    made = MultiHeadAttention(6, 3)
    x = torch.randn(2, 7, 6, requires_grad=True)
    y = made(x)
    found = counted(lambda: y.sum().backward())
    n, d = 14, 6
    assert found.total.multiply_adds == 2 * 4 * n * d * d + 5 * 2 * 7 * 7 * d
    convolution = torch.nn.Conv1d(6, 4, 3, groups=2)
    z = convolution(torch.randn(2, 6, 9, requires_grad=True))
    found = counted(lambda: z.sum().backward())
    assert found.total.multiply_adds == 2 * z.numel() * 3 * 3


def test_a_recurrence_in_one_kernel_is_counted() -> None:
    made = torch.nn.LSTM(5, 3, batch_first=True)
    with torch.no_grad():
        found = counted(lambda: made(torch.randn(2, 7, 5)))
    assert found.total.multiply_adds == 2 * 7 * 4 * 3 * (5 + 3)


def test_parts() -> None:
    x = torch.randn(3, 5)
    with Counter() as counter:
        with counter.within("one"):
            x @ x.T
        x.T @ x
    assert counter.parts["one"].multiply_adds == 3 * 3 * 5
    assert counter.total.multiply_adds == 3 * 3 * 5 + 5 * 5 * 3


def test_an_unknown_product_is_refused_rather_than_missed() -> None:
    x = torch.randn(3, 5)
    with pytest.raises(ValueError, match="looks like a product"), Counter():
        torch.addmv(x[:, 0], x, x[0])
    with pytest.raises(ValueError, match="looks like a product"), Counter():
        torch.addbmm(x @ x.T, x[None], x.T[None])


# Models

SMALL = replace(
    TransformerConfig.tiny(311),
    width=12,
    heads=6,
    feed_forward=17,
    encoder_layers=1,
    decoder_layers=2,
)
VISION = replace(VisionConfig.tiny(11, (8, 12), 4), layers=2)
LANGUAGE = replace(LanguageConfig.tiny(311), layers=2)
CONFIGS: list[Config] = [
    SMALL,
    replace(
        SMALL,
        share="none",
        position="learned",
        key_heads=2,
        norm="pre",
        activation="swiglu",
        output_bias=True,
        source=ImageSource(image=(8, 12), patch=4),
    ),
    VISION,
    replace(VISION, pool="mean", pool_norm=True, head_width=13),
    LANGUAGE,
    replace(LANGUAGE, position="learned", share=False, norm="post"),
    ClassifierConfig.tiny(7, 311),
    replace(SMALL, mixer="lstm"),
    replace(SMALL, mixer="convolution", kernel=3),
    replace(LANGUAGE, mixer="gru"),
    replace(LANGUAGE, window=3),
    replace(ClassifierConfig.tiny(7, 311), mixer="gru"),
    replace(VISION, mixer="lstm"),
    EncoderConfig.tiny(311),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_a_models_formula_is_what_is_counted(config: Config) -> None:
    found = model_cost(config, length=13, batch=2)
    assert found.formula == found.measured
    assert found.cache == found.cache_formula
    # An image wants no gradient, which saves a little; attention's scores are computed again.
    assert 2.9 < found.training / found.multiply_adds < 3.5


def test_published_sizes() -> None:
    def total(config: Config) -> int:
        return sum(part.parameters for part in model_formula(config, 512).values())

    assert total(TransformerConfig.base(37_000)) == 63_082_496
    assert total(TransformerConfig.big(37_000)) == 214_245_376
    assert total(VisionConfig.base(1000)) == 86_567_656
    assert total(VisionConfig.large(1000)) == 304_326_632
    assert total(VisionConfig.huge(1000)) == 632_045_800


def test_published_multiply_adds() -> None:
    """ViT-B/16 and L/16: 17.6 and 61.6 thousand million, as fvcore and timm count them."""
    for config, published in (
        (VisionConfig.base(1000), 17.58e9),
        (VisionConfig.large(1000), 61.6e9),
    ):
        parts = model_formula(config, 0, every_row=True)
        assert sum(p.multiply_adds for p in parts.values()) == pytest.approx(published, rel=2e-3)


def test_as_hugging_faces_vit_executes() -> None:
    transformers = pytest.importorskip("transformers")
    config = replace(VisionConfig.tiny(11, 32, 4), layers=2)
    peer = transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=192,
            num_hidden_layers=2,
            num_attention_heads=3,
            intermediate_size=768,
            image_size=32,
            patch_size=4,
            num_labels=11,
        )
    ).eval()
    with torch.no_grad():
        found = counted(lambda: peer(torch.zeros(2, 3, 32, 32)))
    parts = model_formula(config, 0, batch=2, every_row=True)
    assert found.total.multiply_adds == sum(part.multiply_adds for part in parts.values())


def test_half_precision_keeps_less() -> None:
    one = replace(LANGUAGE, layers=1)
    full, half = (model_cost(one, 64, 8, p).activations for p in ("fp32", "bf16"))
    assert half < 0.8 * full


def test_a_page_has_the_papers_size_beside_ours() -> None:
    page = model_page("base", model_cost(SMALL, 13), 65e6)
    assert any("65 million in the paper" in note for note in page.notes)


def test_an_unknown_precision() -> None:
    with pytest.raises(ValueError, match="precision"):
        model_cost(TransformerConfig.tiny(31), precision="fp8")


# Where lines cross


def test_crossovers() -> None:
    found = {(a, b): at for a, b, _, at in crossovers(Sizes(width=512))}
    assert found["attention alone", "plain recurrence"] == 512
    assert found["attention, with projections", "plain recurrence"] is None
    assert found["attention, with projections", "LSTM"] == 1024


@pytest.mark.parametrize("width", [4, 6])
def test_costs_are_equal_where_they_cross(width: int) -> None:
    for a, b, _, at in crossovers(Sizes(width=width, heads=1, kernel=5)):
        if at is None or a == "the two products":
            continue
        sizes = Sizes(length=int(at), width=width, heads=1, kernel=5)
        one, other = (layer(each.split(", 5 taps")[0]).cost(sizes) for each in (a, b))
        assert one.multiply_adds == other.multiply_adds


def test_short_numbers() -> None:
    assert [short(n) for n in (0, 999, 1000, 63_082_496, None)] == [
        "0",
        "999",
        "1 k",
        "63.08 M",
        "—",
    ]


# The command


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["cost", *words]) == 0
    return capsys.readouterr().out


def test_cost_of_layers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plot = tmp_path / "cost.svg"
    words = ("layers", "--length", "12", "--width", "16", "--window", "2", "--heads", "2")
    said = run(capsys, *words, "--plot", str(plot))
    assert "4nd² + 2n²d" in said
    assert "exercise sheet" in said
    assert plot.read_text().startswith("<svg")
    found = json.loads(run(capsys, *words, "--json"))
    attention = found["layers"][0]
    assert attention["counted"]["multiply_adds"] == 4 * 12 * 16**2 + 2 * 12**2 * 16
    assert attention["formula"]["multiply_adds"] == attention["counted"]["multiply_adds"]
    assert {row["document"] for row in found["documents"]} >= {"slides", "handout"}
    assert "| convolution | kd² + d |" in run(capsys, *words, "--markdown")


def test_cost_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    said = run(capsys, "tiny", "--length", "32", "--vocabulary", "311")
    assert "attention projections" in said
    assert "≠ " not in said.split("✓ the count equals")[0]


@pytest.mark.parametrize(
    ("words", "config"),
    [
        (["big"], TransformerConfig.big(37_000)),
        (["base", "--vocabulary", "311"], TransformerConfig.base(311)),
        (["vit-ti/8", "--image", "32", "--classes", "5"], VisionConfig.tiny(5, 32, 8)),
        (["vit-b/16", "--image", "384"], VisionConfig.base(1000, 384)),
        (["vit-h"], VisionConfig.huge(1000)),
    ],
)
def test_names_of_models(words: list[str], config: Config) -> None:
    assert named(parser().parse_args(words))[1] == config


def test_cost_of_a_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = Transformer(SMALL)
    checkpoint.save(tmp_path / "model", model)
    (tmp_path / "model" / "model.safetensors").unlink()  # which nobody reads
    found = json.loads(run(capsys, str(tmp_path / "model"), "--length", "7", "--json"))
    assert found["parameters"] == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["bse"], "neither a folder nor a known name"),
        (["base", "--image", "32"], "--image makes no difference to base"),
        (["vit-b/16", "--length", "5"], "--length makes no difference to vit-b/16"),
        (["vit-x"], "vit-x is unknown"),
        (["vit-b/16", "--image", "100"], "patch"),
        (["layers", "--width", "10", "--heads", "3"], "heads"),
        (["layers", "--length", "0"], "--length (0) must be from 1 to 100,000,000"),
        (["layers", "--length", "many"], "invalid int value"),
        ([], "required"),
        (["vit-b", "--image", "32", "--plot", "x.svg"], "no plot"),
    ],
)
def test_bad_words_are_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["cost", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("regard: ")
    assert err.count("\n") == 1
    assert said in err


def test_a_folder_that_is_no_models(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert cli.main(["cost", str(tmp_path)]) == 2
    assert "not the config of a Regard model" in capsys.readouterr().err
    assert cli.main(["cost", str(tmp_path / "config.json")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
