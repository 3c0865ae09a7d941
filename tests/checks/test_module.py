"""Modules of one's own are checked on example inputs, and each way of breaking one is caught."""

import copy
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import LanguageModel, MultiHeadAttention, Transformer, VisionTransformer, check
from regard.checks import Report, properties
from regard.checks.attention import formula
from regard.checks.module import PROPERTIES
from regard.model.vit import VisionConfig

ATTENTION = {
    "fused = formula",
    "recorded = unrecorded",
    "weights × values = output",
    "gradients: fused = formula",
}


class Attention(nn.Module):
    """An attention layer as people write it; subclasses break it in one place."""

    def __init__(self, heads: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.projection, self.output = nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.projection(x).chunk(3, -1)
        )
        return self.output(self.attend(q, k, v, mask).transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask)


MASK = torch.rand(3, 1, 5, 5, generator=torch.Generator().manual_seed(1)) < 0.7
MASK |= torch.eye(5, dtype=torch.bool)


def statuses(report: Report) -> dict[str, str]:
    return {finding.name: finding.status for finding in report}


def batch() -> Tensor:
    return torch.randn(3, 5, 12, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (Attention(), {}),
        (Attention(), {"mask": MASK}),
        (Attention().bfloat16(), {}),
        (Attention().double(), {}),
        (MultiHeadAttention(12, 3), {}),
        (nn.TransformerEncoderLayer(12, 3, batch_first=True), {}),
    ],
    ids=["own", "with a mask", "bfloat16", "float64", "regard's layer", "torch's layer"],
)
def test_a_sound_module_holds(model: nn.Module, inputs: dict[str, Tensor]) -> None:
    x = batch().to(next(model.parameters()).dtype)
    report = check(model, x, **inputs)
    skipped = {"float32 ≈ float64"} if x.dtype == torch.float64 else set()
    assert {name for name, status in statuses(report).items() if status == "skipped"} == skipped
    assert report.holds
    assert bool(report)
    assert [finding.name for finding in report] == [
        prop.name for prop in PROPERTIES if prop.default
    ]
    assert str(report).startswith(f"{type(model).__name__}, on 3 examples: inputs of (3, 5, 12)")
    assert "✓ batch = one by one" in report._repr_html_()


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_models_of_hugging_face_hold(kind: str, implementation: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 31, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3}
    if kind == "bert":
        config = transformers.BertConfig(**sizes, intermediate_size=40)
        model = transformers.BertModel(config)
    else:
        config = transformers.GPT2Config(
            vocab_size=31, n_embd=24, n_layer=1, n_head=3, bos_token_id=0, eos_token_id=0
        )
        model = transformers.GPT2LMHeadModel(config)
    model.set_attn_implementation(implementation)
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    report = check(model, input_ids=torch.randint(3, 31, (2, 7)), attention_mask=mask)
    assert report.holds
    skipped = {finding.name: finding.of for finding in report if finding.status == "skipped"}
    assert set(skipped) == (ATTENTION if implementation == "eager" else set())
    if skipped:
        assert 'load the model with attn_implementation="sdpa"' in skipped["recorded = unrecorded"]


def test_what_cannot_be_measured_is_skipped_with_the_reason() -> None:
    class Written(Attention):
        def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
            return (q @ k.mT / 2).softmax(-1) @ v

    report = check(Written(), batch()[:1])
    reasons = {finding.name: finding.of for finding in report if finding.status == "skipped"}
    assert set(reasons) == {*ATTENTION, "batch = one by one"}
    assert "written out as softmax" in reasons["recorded = unrecorded"]
    assert "give two or more" in reasons["batch = one by one"]
    assert report.holds
    layer, x = nn.MultiheadAttention(12, 3), torch.randn(5, 2, 12)
    (finding,) = check(layer, x, x, x, properties=["batch = one by one"])
    assert "batch_axis=1" in finding.of
    (finding,) = check(layer, x, x, x, properties=["batch = one by one"], batch_axis=1)
    assert finding.status == "holds"


# Broken on purpose


class BatchMean(Attention):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x - x.mean(0), mask)


def fused() -> bool:
    return torch.backends.cuda.flash_sdp_enabled()


class MaskIgnored(Attention):
    """By the fused kernel alone."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return super().attend(q, k, v, None if fused() else mask)


class MaskIgnoredInInference(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return super().attend(q, k, v, mask if torch.is_grad_enabled() else None)


class DropoutInEvaluation(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, dropout_p=0.5)


class Detached(Attention):
    """The fused kernel has no gradient of queries."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return super().attend(q.detach() if fused() else q, k, v, mask)


class Alternating(Attention):
    """Gradients depend on how often the model ran."""

    runs = 0

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        Alternating.runs += 1
        return super().attend(q * 1, k, v.detach() if Alternating.runs % 2 else v, mask)


class Cancelling(Attention):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward((x + 1e6) - 1e6, mask)


class Uncalled(Attention):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(F.linear(x, self.output.weight), mask) @ self.output.weight

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(12, 12)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return super().attend(q, k, v, mask) * self.extra.bias.mean()


class Bypassed(Attention):
    """A fast path of inference goes past a layer."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if torch.is_grad_enabled():
            return super().forward(self.first(x), mask)
        return super().forward(F.linear(x, self.first.weight, self.first.bias), mask)

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12)


class InAList(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.scales = [nn.Parameter(torch.tensor(2.0))]

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x * self.scales[0], mask)


class Forgetful(Attention):
    """Its state dict has no output layer's weights, and loading does not mind."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        if not kwargs.get("keep_vars"):
            state["output.weight"] = state["output.weight"] * 0.5
        return state


class Growing(Attention):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        with torch.no_grad():
            self.output.bias += 1e-5
        return super().forward(x, mask)


class OnlyOnce(Attention):
    """Changes its weights in its first run alone."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        with torch.no_grad():
            self.output.weight.clamp_(-0.1, 0.1)
        return super().forward(x, mask)


class Leaking(Attention):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        self.output.register_forward_hook(lambda *_: None)
        return super().forward(x, mask)


class LeakingEverywhere(Attention):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        nn.modules.module.register_module_forward_hook(lambda *_: None)
        return super().forward(x, mask)


class InPlace(Attention):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x.mul_(0.5), mask)


class Switching(Attention):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        self.output.train()
        return super().forward(x, mask)


class Drawing(Attention):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        torch.rand(())
        return super().forward(x, mask)


BROKEN: list[tuple[str, type[Attention]]] = [
    ("batch = one by one", BatchMean),
    ("fused = formula", MaskIgnored),
    ("no_grad = grad", MaskIgnoredInInference),
    ("weights × values = output", DropoutInEvaluation),
    ("again = first", DropoutInEvaluation),
    ("gradients: fused = formula", Detached),
    ("gradients: again = first", Alternating),
    ("float32 ≈ float64", Cancelling),
    ("hooks fire", Uncalled),
    ("hooks fire", Bypassed),
    ("loaded = saved", InAList),
    ("loaded = saved", Forgetful),
    ("evaluation changes nothing", Growing),
    ("evaluation changes nothing", OnlyOnce),
    ("evaluation changes nothing", Leaking),
    ("evaluation changes nothing", LeakingEverywhere),
    ("evaluation changes nothing", InPlace),
    ("evaluation changes nothing", Switching),
    ("evaluation changes nothing", Drawing),
]


@pytest.mark.parametrize(("name", "kind"), BROKEN, ids=[f"{n}-{k.__name__}" for n, k in BROKEN])
def test_a_broken_module_is_caught_and_left_as_it_was(name: str, kind: type[Attention]) -> None:
    torch.manual_seed(0)
    model, x = kind().train(), batch()
    model.output.weight.grad = torch.ones(12, 12)
    handle = model.projection.register_forward_hook(lambda *_: None)
    before, chance = snapshot(model), torch.get_rng_state()
    report = check(model, x, mask=MASK)
    assert statuses(report)[name] == "fails"
    assert not report.holds
    assert not report
    assert f"\n{name} does not hold (" in str(report)
    assert torch.equal(x, batch())
    assert torch.equal(chance, torch.get_rng_state())
    assert snapshot(model) == before
    handle.remove()


def snapshot(model: nn.Module) -> object:
    """Weights, gradients, hooks and modes."""
    return (
        [(name, part.tolist()) for name, part in model.state_dict().items()],
        [None if part.grad is None else part.grad.tolist() for part in model.parameters()],
        [(list(m._forward_hooks), list(m._forward_pre_hooks)) for m in model.modules()],
        [m.training for m in model.modules()],
        [part.requires_grad for part in model.parameters()],
        list(nn.modules.module._global_forward_hooks),
    )


@pytest.mark.filterwarnings("ignore:.*nested tensors")  # PyTorch warns once for each process
def test_a_fast_path_that_recording_turns_off_is_caught() -> None:
    """PyTorch's encoder gives zeros for padding in inference, and other numbers in training."""
    layer = nn.TransformerEncoderLayer(12, 2, batch_first=True)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    x = batch()[:2]
    report = check(nn.TransformerEncoder(layer, 1), x, src_key_padding_mask=padding)
    assert {finding.name for finding in report.failures} == {
        "fused = formula", "recorded = unrecorded", "no_grad = grad",
    }  # fmt: skip
    assert "enable_nested_tensor=False" in str(report)
    plain = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    assert check(plain, x, src_key_padding_mask=padding).holds


class Precisions(Attention):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        PRECISIONS.add(torch.backends.cuda.matmul.fp32_precision)
        return super().forward(x, mask)


PRECISIONS: set[str] = set()


def test_products_are_exact_while_checking() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        check(Precisions(), batch(), properties=["batch = one by one", "gradients: again = first"])
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert {"ieee"} == PRECISIONS


@pytest.mark.gpu
def test_modules_on_a_gpu_hold() -> None:
    layer, x = nn.TransformerEncoderLayer(12, 3, batch_first=True).cuda(), batch().cuda()
    for model in (Attention().cuda(), MultiHeadAttention(12, 3).cuda(), layer):
        report = check(model, x)
        assert set(statuses(report).values()) == {"holds"}
    report = check(LanguageModel.tiny(vocabulary=31).cuda(), properties=FEW)
    assert set(statuses(report).values()) == {"holds"}


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
def test_a_compiled_module_holds() -> None:
    model = nn.Sequential(Attention(), nn.TransformerEncoderLayer(12, 3, batch_first=True))
    (finding,) = check(model, batch(), properties=["compiled = eager"])
    assert finding.status == "holds"
    assert check(torch.compile(model, backend="eager"), batch(), properties=["hooks fire"]).holds


@pytest.mark.usefixtures("unchecked")
def test_compilation_is_checked_where_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(model: nn.Module, **options: Any) -> Callable[..., Tensor]:
        return lambda *inputs: 1.001 * model(*inputs)

    monkeypatch.setattr(torch, "compile", wrong)
    (finding,) = check(Attention(), batch(), properties=["compiled = eager"])
    assert finding.status == "fails"


def test_every_property_can_be_broken() -> None:
    others = {"recorded = unrecorded", "compiled = eager"}
    assert {prop.name for prop in PROPERTIES} - others == {name for name, _ in BROKEN}


def test_the_documentation_lists_every_property() -> None:
    page = Path(__file__).parents[2] / "docs" / "checks.md"
    rows = re.findall(
        r"^\| (.*?[=≈] .*?|hooks fire|evaluation .*?) \|", page.read_text("utf-8"), re.M
    )
    assert rows == [prop.name for prop in (*PROPERTIES, *properties.PROPERTIES)]


def test_the_formula_is_torchs() -> None:
    q, k, v = torch.randn(2, 6, 5, 4), torch.randn(2, 3, 7, 4), torch.randn(2, 3, 7, 2)
    wide = [part.repeat_interleave(2, 1) for part in (k, v)]
    hidden = torch.rand(2, 1, 5, 7) < 0.5
    hidden[0, 0, 2] = False
    for options in ({}, {"is_causal": True}, {"attn_mask": hidden}, {"attn_mask": hidden.float()}):
        expected = F.scaled_dot_product_attention(q, *wide, scale=0.3, **options)
        found = formula(q, k, v, scale=0.3, enable_gqa=True, **options)
        torch.testing.assert_close(found, expected)
    weights = (q @ wide[0].mT / math.sqrt(4)).softmax(-1)
    torch.testing.assert_close(formula(q, *wide), weights @ wide[1])


# Inputs


def test_a_module_that_holds_activations_is_copied() -> None:
    class Keeping(Attention):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            self.last = [super().forward(x, mask)]
            return self.last[0]

    model = Keeping()
    model(batch())
    assert check(model, batch()).holds


@pytest.mark.usefixtures("unchecked")
class Phase(nn.Module):
    """A complex product; its imaginary part depends on the mode of gradients if `broken`."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 7, dtype=torch.complex64))
        self.broken = broken

    def forward(self, x: Tensor) -> Tensor:
        product = x.to(torch.complex64) @ self.weight
        return product.conj() if self.broken and torch.is_grad_enabled() else product


def test_imaginary_parts_are_compared() -> None:
    x = torch.randn(3, 7)
    assert check(Phase(broken=False), x).holds
    report = check(Phase(broken=True), x, properties="no_grad = grad")
    assert [finding.status for finding in report] == ["fails"]


@pytest.mark.usefixtures("unchecked")
def test_errors_name_the_remedy() -> None:
    model, x = Attention(), batch()
    before = snapshot(model)
    for call, message in (
        (lambda: check(model), r"Attention needs example inputs, .*: check\(model, x\)"),
        (lambda: check(nn.LazyLinear(3), x), "LazyLinear has lazy layers .*; call it once, then c"),
        (lambda: check(model, x[..., :5]), "Attention does not run on these inputs: RuntimeErr"),
        (lambda: check(model, x, properties=["hook fires"]), "'hook fires' is no property; did yo"),
        (lambda: check(model, x, device="cpu"), "device are for a folder; a model is checked wher"),
        (lambda: check(lambda x: x, x), "takes a model or the folder of one, not function"),
        (lambda: check("folder", x), r"a folder is checked on files, not inputs; .* by data=\["),
        (lambda: check(nn.Identity(), torch.arange(3)), "returns no floating-point tensor"),
        (lambda: check(model, data=x), r"a model is checked where it is, on inputs: check\(mo"),
        (lambda: check(Attention().to("meta"), x.to("meta")), "Attention is on the meta device"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            call()
        assert "\n" not in str(error.value)
    assert snapshot(model) == before
    with pytest.raises(TypeError, match=r"no argument 'propertys' for a folder; .* properties and"):
        check("folder", propertys=[])


FEW = ["fused = formula", "packed = padded", "batch = one by one", "recorded = unrecorded"]


def test_regards_models_need_no_inputs() -> None:
    torch.manual_seed(0)
    sizes = {"width": 12, "heads": 3, "feed_forward": 20}
    vision = VisionConfig(5, **sizes, layers=1, image=12, patch=6)
    language = LanguageModel.tiny(vocabulary=31)
    before = copy.deepcopy(language.state_dict())
    report = check(language.train(), properties=FEW)
    assert set(statuses(report).values()) == {"holds"}
    assert report.origin == "random inputs"
    assert language.training
    assert all(torch.equal(before[name], part) for name, part in language.state_dict().items())
    report = check(VisionTransformer(vision), torch.randn(4, 3, 12, 12), properties=FEW)
    assert statuses(report)["batch = one by one"] == "holds"
    assert report.examples == 4
    ids = torch.randint(3, 31, (3, 7))
    report = check(language, ids, lengths=[7, 2, 4], properties=FEW)
    assert "logits at 13 positions" in report.findings[0].of
    model = Transformer.tiny(vocabulary=31)
    report = check(model, ids, ids[:, :5], source_lengths=[7, 2, 4], properties=FEW)
    assert "logits at 15 positions" in report.findings[0].of
    assert report.holds
    with pytest.raises(ValueError, match="missing a required argument: 'target'"):
        check(model, ids)
