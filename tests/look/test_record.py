"""Recorded weights are those that the model used."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention.attend import attend, distribution
from regard.attention.core import Core
from regard.attention.mask import Mask, causal
from regard.attention.multihead import MultiHeadAttention
from regard.attention.position import ALiBi
from regard.attention.score import AdditiveScore, AlignmentScore
from regard.decode.engine.pick import open_session
from regard.decode.search.beam import beam
from regard.look.effect import changed
from regard.look.record import record
from regard.look.view import view_of
from regard.model.transformer import Transformer, TransformerConfig

CROSS = "decoder.blocks.1.cross"


def small(**changes: object) -> Transformer:
    torch.manual_seed(0)
    config = TransformerConfig(
        31, width=24, heads=4, feed_forward=40, encoder_layers=2, decoder_layers=2
    )
    return Transformer(replace(config, **changes)).eval()


@pytest.mark.parametrize("position", ["sinusoidal", "rotary", "linear-bias"])
def test_every_attention_is_seen(position: str) -> None:
    model = small(position=position, key_heads=2)
    source, target = torch.randint(31, (3, 11)), torch.randint(31, (3, 7))
    with record(model) as seen:
        model(source, target, source_lengths=[11, 5, 2])
    assert list(seen) == [
        *(f"encoder.blocks.{n}.attention" for n in range(2)),
        *(f"decoder.blocks.{n}.{part}" for n in range(2) for part in ("attention", "cross")),
    ]
    cross = seen["decoder.blocks.1.cross"].weights()
    assert cross.shape == (3, 4, 7, 11)
    torch.testing.assert_close(cross.sum(-1), torch.ones(3, 4, 7))
    assert cross[1, :, :, 5:].eq(0).all()
    own = seen["decoder.blocks.0.attention"].weights()
    assert own.triu(1).eq(0).all()


def test_the_weights_give_the_attentions_output() -> None:
    model = small()
    kept = {}
    core = model.decoder.blocks[0].cross.core
    handle = core.register_forward_hook(lambda module, given, out: kept.update(v=given[2], out=out))
    with record(model, lambda name: name.endswith("cross")) as seen:
        model(torch.randint(31, (2, 5)), torch.randint(31, (2, 3)))
    handle.remove()
    assert set(seen) == {"decoder.blocks.0.cross", "decoder.blocks.1.cross"}
    torch.testing.assert_close(seen["decoder.blocks.0.cross"].weights() @ kept["v"], kept["out"])


def test_other_scores_are_recorded_as_they_are_used() -> None:
    layer = MultiHeadAttention(12, 3, score=AdditiveScore(4, 4, 5, heads=3)).eval()
    x = torch.randn(2, 5, 12)
    kept = {}
    layer.core.register_forward_hook(lambda module, given, out: kept.update(v=given[2], out=out))
    with record(layer) as seen:
        layer(x)
    assert "  '': 2 ×" in repr(seen)
    torch.testing.assert_close(seen[""].weights() @ kept["v"], kept["out"])


def test_an_unknown_name_is_refused_with_the_names_there_are() -> None:
    model = small()
    with record(model, lambda name: name == CROSS) as seen:
        model(torch.randint(31, (2, 5)), torch.randint(31, (2, 3)))
    with pytest.raises(KeyError, match=f"'encoder.x' was not recorded; there are {CROSS}"):
        seen["encoder.x"]
    layer = MultiHeadAttention(12, 3)
    with record(layer) as seen:
        layer(torch.randn(2, 5, 12))
    with pytest.raises(KeyError, match="there are '', the model itself"):
        seen["attention"]


def test_statistics_of_what_was_seen() -> None:
    model = small()
    with record(model) as seen:
        model(torch.randint(31, (2, 5)), torch.randint(31, (2, 3)))
    assert "  decoder.blocks.1.cross: 2 × 4 × 3 × 5" in repr(seen)
    asked = seen["encoder.blocks.0.attention"]
    torch.testing.assert_close(asked.statistics().received, asked.weights().sum(-2))


def test_statistics_show_themselves_in_a_notebook() -> None:
    model = small()
    with record(model) as seen:
        model(torch.randint(31, (2, 5)), torch.randint(31, (2, 3)))
    found = seen["encoder.blocks.0.attention"].statistics()
    assert repr(found).startswith(
        "AttentionStatistics(entropy (2, 4, 5), received (2, 4, 5), top_w"
    )
    shown = found._repr_html_()
    assert "2 × 4 × 5" in shown
    assert f"{float(found.entropy.mean()):.3f} nats" in shown
    assert f"key {int(found.received.sum((0, 1)).argmax())}" in shown


# Cores of one's own


class Sigmoid(Core):
    """sigmoid(β q·k) v, whose rows do not sum to 1."""

    def weights(
        self,
        query: Tensor,
        key: Tensor,
        mask: Mask | None = None,
        bias: Tensor | None = None,
        rows: Any = None,
    ) -> Tensor:
        weights = (query @ key.mT * query.shape[-1] ** -0.5).sigmoid()
        if mask is not None:
            weights = weights * mask.tensor(*weights.shape[-2:])
        return weights if rows is None else weights[..., rows, :]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Mask | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        return self.weights(query, key, mask, bias) @ value


class Differential(Sigmoid):
    """The difference of two softmaxes, the second times a learned λ (Ye et al. 2024)."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(0.8))

    def weights(
        self,
        query: Tensor,
        key: Tensor,
        mask: Mask | None = None,
        bias: Tensor | None = None,
        rows: Any = None,
    ) -> Tensor:
        L, S = query.shape[-2], key.shape[-2]
        allowed = None if mask is None else mask.tensor(L, S)
        pairs = zip(query.chunk(2, -1), key.chunk(2, -1))
        first, second = (distribution(q, k, allowed) for q, k in pairs)
        weights = first - self.factor * second
        return weights if rows is None else weights[..., rows, :]


class ForwardOnly(Core):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
        return attend(query, key, value, beta=0.0)


class ForwardOfSigmoid(Sigmoid):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
        return super().forward(2 * query, key, value, **kwargs)


class NoCore(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
        return attend(query, key, value)


class Attending(AlignmentScore):
    """A score with an attention of its own."""

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        return query @ key.mT

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        return value.mean(-2, keepdim=True).expand_as(query)


def watched(layer: MultiHeadAttention) -> dict[str, Tensor]:
    """The inputs and the output of a layer's core, as they are when the layer runs."""
    kept: dict[str, Tensor] = {}
    layer.core.register_forward_hook(lambda core, inputs, out: kept.update(v=inputs[2], out=out))
    return kept


@pytest.mark.parametrize("kind", [Sigmoid, Differential])
def test_a_core_of_ones_own_is_recorded_by_its_own_weights(kind: type[Core]) -> None:
    torch.manual_seed(0)
    layer = MultiHeadAttention(12, 3).eval()
    layer.core = kind()
    kept = watched(layer)
    with record(layer) as seen:
        layer(torch.randn(2, 5, 12), mask=causal())
    asked = seen[""]
    whole = asked.weights()
    torch.testing.assert_close(whole @ kept["v"], kept["out"])
    assert not torch.allclose(whole.sum(-1), torch.ones(2, 3, 5))
    torch.testing.assert_close(asked.weights([1, 3]), whole[:, :, [1, 3]])
    assert asked.overview(cells=2).shape == (2, 3, 2, 2)
    with pytest.raises(ValueError, match=rf"which {kind.__name__} is not; use weights"):
        asked.statistics()
    shown = view_of(seen, list("abcde"))
    torch.testing.assert_close(shown.maps[0].weights[0], whole[0])
    assert all(habit.entropy.isfinite().all() for habit in shown.maps[0].habits)
    notes = shown.to_json()["notes"]
    assert bool(notes) == (kind is Differential)
    if notes:
        assert notes[0].startswith("Weights lie from -0.")


def test_weights_of_a_core_whose_parameters_have_changed_are_refused() -> None:
    layer = MultiHeadAttention(12, 3)
    layer.core = Differential()
    with record(layer) as seen:
        layer(torch.randn(2, 5, 12))
    with torch.no_grad():
        layer.core.factor.add_(0.1)
    with pytest.raises(ValueError, match="Differential have changed since it was recorded"):
        seen[""].weights()


def test_a_learned_beta_is_recorded_as_it_was() -> None:
    layer = MultiHeadAttention(12, 3, beta=nn.Parameter(torch.ones(3)))
    with record(layer) as seen:
        layer(torch.randn(2, 5, 12))
    before = seen[""].weights()
    with torch.no_grad():
        layer.core.beta.mul_(5)
    assert torch.equal(seen[""].weights(), before)


@pytest.mark.parametrize(
    ("core", "message"),
    [
        (
            ForwardOnly(),
            r"\Adecoder.blocks.1.cross.core \(ForwardOnly\) overrides forward without weights, so "
            r"its attention weights are unknown; give ForwardOnly a method weights\(query, key, "
            r"mask, bias, rows\)\Z",
        ),
        (ForwardOfSigmoid(), r"core \(ForwardOfSigmoid\) overrides forward without weights"),
        (
            NoCore(),
            r"\Adecoder.blocks.1.cross.core \(NoCore\) is not a Core, .* derive NoCore from "
            r"regard.attention.core.Core, with forward and weights\Z",
        ),
        (Core(Attending()), r"cross.core.score \(Attending\) overrides attend"),
    ],
    ids=["forward alone", "forward of another's", "no core", "a score that attends"],
)
def test_a_core_whose_weights_are_unknown_is_refused(core: nn.Module, message: str) -> None:
    model = small()
    model.decoder.blocks[1].cross.core = core
    with pytest.raises(ValueError, match=message), record(model):
        pass
    with record(model, lambda name: name.startswith("encoder")) as seen:
        model(torch.randint(31, (2, 5)), torch.randint(31, (2, 3)))
    assert len(seen) == 2
    source = torch.randint(31, (2, 5))
    with pytest.raises(ValueError, match=message):
        open_session(model, source, attention=True)
    change = changed(model, off=[(CROSS, 1)])
    if isinstance(core, Core):
        with change:  # needs no weights
            model(source, source)
    else:
        with pytest.raises(ValueError, match=message), change:
            pass


def test_a_forward_replaced_on_the_instance_is_refused() -> None:
    layer = MultiHeadAttention(12, 3)
    layer.core.forward = lambda query, key, value, mask, bias: value
    with pytest.raises(ValueError, match=r"\Acore \(Core\) overrides forward"), record(layer):
        pass


def test_a_subclass_of_core_without_changes_is_recorded() -> None:
    class Named(Core):
        pass

    layer = MultiHeadAttention(12, 3)
    layer.core = Named()
    with record(layer) as seen:
        layer(torch.randn(2, 5, 12))
    assert seen[""].statistics().entropy.shape == (2, 3, 5)


@pytest.mark.parametrize("score", [None, AdditiveScore(4, 4, 5, heads=3)])
def test_weights_of_a_core_are_those_of_its_forward(score: AlignmentScore | None) -> None:
    core = Core(score, None if score else 0.7)
    query, key, value = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4), torch.randn(2, 3, 7, 2)
    bias = torch.randn(5, 7)
    given = {"mask": causal(), "bias": bias[None, None]}
    whole = core.weights(query, key, **given)
    torch.testing.assert_close(whole @ value, core(query, key, value, **given))
    torch.testing.assert_close(core.weights(query, key, **given, rows=[4, 1]), whole[:, :, [4, 1]])


@pytest.mark.parametrize("early", [True, False])
def test_a_pre_hook_of_ones_own_is_recorded_too(early: bool) -> None:
    """Whether it is registered before the recording begins or after."""
    layer = MultiHeadAttention(12, 3, position=ALiBi(3)).eval()
    x, kept, modules = torch.randn(2, 5, 12), watched(layer), []

    def double(core: Core, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        core.last = inputs[0]
        modules.append(type(core).__name__)
        return 2 * inputs[0], *inputs[1:]

    if early:
        layer.core.register_forward_pre_hook(double)
    with record(layer) as seen, changed(layer, beta={("", 1): 0.5}):
        if not early:
            layer.core.register_forward_pre_hook(double)
        layer(x)
    torch.testing.assert_close(seen[""].weights() @ kept["v"], kept["out"])
    torch.testing.assert_close(seen[""].query, 2 * layer.core.last)
    assert modules == ["Core"]


def test_the_coverage_penalty_reads_the_weights_that_were_used() -> None:
    model = small()
    model.decoder.blocks[1].cross.core = Core(AdditiveScore(6, 6, 5, heads=4))
    source = torch.randint(31, (2, 7))
    session = open_session(model, source, attention=True)
    with record(model, lambda name: name == CROSS) as seen, session:
        beam(session, [[1], [1]], width=1, end=2, max_length=1, coverage=0.4)
        attention = session.attention
    torch.testing.assert_close(attention, seen[CROSS].weights().mean(1)[:, -1])


# Recordings of nothing


class Written(nn.Module):
    """An attention that is written out."""

    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.mT).softmax(-1) @ x


class Calling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize(
    ("model", "select", "message"),
    [
        (Written(), lambda name: True, "no attention was called by name; regard's Multi.*written"),
        (nn.Linear(4, 4), lambda name: True, "no attention was called by name"),
        (nn.Sequential(Calling()), lambda name: name == "1", r"`select` is False for '0'"),
        (
            nn.Sequential(*(MultiHeadAttention(4, 1) for _ in range(5))),
            lambda name: name == "attention",
            r"`select` is False for '0', '1', '2' and 2 more",
        ),
    ],
)
def test_recording_nothing_warns_with_the_reason(
    model: nn.Module, select: Callable[[str], bool], message: str
) -> None:
    with (
        pytest.warns(UserWarning, match=f"\\Anothing was recorded: .*{message}") as caught,
        record(model, select) as seen,
    ):
        model(torch.randn(1, 3, 4))
    assert seen == {}
    assert [warning.filename for warning in caught] == [__file__]
    with pytest.raises(RuntimeError, match="on purpose"), record(model, select):
        raise RuntimeError("on purpose")  # which says enough


def test_a_model_that_did_not_run_warns() -> None:
    message = "'encoder.blocks.0.attention', .* and 3 more was not called"
    with pytest.warns(UserWarning, match=message), record(small()):
        pass


def test_another_models_attention_is_not_recorded() -> None:
    with pytest.warns(UserWarning, match="nothing was recorded"), record(Calling()):
        Calling()(torch.randn(1, 3, 4))


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
def test_a_compiled_model_is_recorded_and_changed() -> None:
    model, inputs = small(), (torch.randint(31, (2, 5)), torch.randint(31, (2, 3)))
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(*inputs)
        with record(model) as expected:
            model(*inputs)
        with record(model) as seen:
            compiled(*inputs)
        assert list(seen) == list(expected)
        for name, asked in expected.items():
            torch.testing.assert_close(seen[name].weights(), asked.weights())
        with changed(model, off=[(CROSS, 2)]):
            torch.testing.assert_close(compiled(*inputs), model(*inputs))
        torch.testing.assert_close(compiled(*inputs), model(*inputs))


def test_attentions_that_share_a_core_are_refused() -> None:
    model = nn.Sequential(MultiHeadAttention(12, 3), MultiHeadAttention(12, 3))
    model[1].core = model[0].core
    with pytest.raises(ValueError, match="1 shares its core with another attention"), record(model):
        pass
    with record(model, select=lambda name: name == "1") as seen:
        model(torch.randn(2, 5, 12))
    assert list(seen) == ["1"]


def test_a_recorded_call_prints_sizes_instead_of_tensors() -> None:
    layer = MultiHeadAttention(width=32, heads=4)
    with record(layer) as recording:
        layer(torch.randn(2, 5, 32), mask=causal())
    text = repr(list(recording.values()))
    assert text == "[AttentionCall(query (2, 4, 5, 8), key (2, 4, 5, 8), mask causal())]"
