"""Every engine, with every option and every kind of model, finds what the eager engine finds.

cuda    on a GPU, or without one where there is Triton and TRITON_INTERPRET=1; against the
        model's own modules in float32, token by token
int8    against the modules with the same 8-bit layers, and keys and values of as many bits:
        logits step by step, since where a sum differs in its last bit an integer may be rounded
        the other way, and what is found from these logits token by token
"""

import os
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.attention.mask import PackedLengths
from regard.cli.inference import InferenceOptions, report_fallback
from regard.decode.engine.eager import EagerEngine, EagerSession
from regard.decode.engine.ensemble import ensemble
from regard.decode.engine.int8.linear import int8
from regard.decode.engine.parts import has_hooks, modules, target
from regard.decode.engine.pick import open_session, pick
from regard.decode.engine.session import Session
from regard.decode.search.beam import beam, gnmt, power
from regard.decode.search.greedy import greedy
from regard.decode.search.hypothesis import Hypothesis
from regard.decode.search.sample import sample
from regard.model.baseline import Recurrent
from regard.model.language import LanguageConfig, LanguageModel
from regard.model.transformer import (
    AudioSource,
    ImageSource,
    TextSource,
    Transformer,
    TransformerConfig,
)
from tests.decode.int8.samples import halved

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Where a step of a kernel takes as long as a sentence elsewhere."""

N, START, END, MOST = 97, 1, 2, 5 if INTERPRETED else 11
SIZES: dict[str, Any] = {"width": 64, "heads": 4, "feed_forward": 83, "dropout": 0.0, "length": 53}
TEXT = TransformerConfig(N, encoder_layers=2, decoder_layers=2, **SIZES)
LANGUAGE = LanguageConfig(N, layers=2, **SIZES)

MODELS: dict[str, TransformerConfig | LanguageConfig] = {
    "the paper's": TEXT,
    "pre-norm, gelu": replace(TEXT, norm="pre", activation="gelu"),
    "final norm, silu": replace(TEXT, final_norm=True, activation="silu", output_bias=True),
    "swiglu": replace(TEXT, activation="swiglu"),
    "grouped heads": replace(TEXT, key_heads=2),
    "rotary": replace(TEXT, position="rotary"),
    "learned": replace(TEXT, position="learned", share="none"),
    "sinusoidal-halves": replace(TEXT, position="sinusoidal-halves", scale=False),
    "linear-bias": replace(TEXT, position="linear-bias"),
    "no positions": replace(TEXT, position="none"),
    "narrow heads": replace(TEXT, heads=8),
    "two vocabularies": replace(TEXT, share="target", source=TextSource(vocabulary=31)),
    "images": replace(TEXT, source=ImageSource(image=(6, 10), patch=2, channels=1)),
    "audio": replace(TEXT, source=AudioSource(features=5)),
    "language": LANGUAGE,
    "language, the paper's blocks": replace(
        LANGUAGE, norm="post", activation="relu", position="sinusoidal"
    ),
    "language, grouped heads": replace(LANGUAGE, key_heads=1),
    "language, linear-bias": replace(LANGUAGE, position="linear-bias"),
    "window": replace(TEXT, window=3),
    "window, linear-bias": replace(TEXT, window=2, position="linear-bias"),
    "window, rows and columns": replace(
        TEXT, window=1, source=ImageSource(image=(6, 10), patch=2, channels=1)
    ),
    "language, window": replace(LANGUAGE, window=3),
}

Find = Callable[[Session, list[list[int]]], list[list[Hypothesis]]]


def _one(search: Any, **options: Any) -> Find:
    given = {"end": END, "max_length": MOST} | options
    return lambda session, prompts: [[one] for one in search(session, prompts, **given)]


def _beam(width: int, **options: Any) -> Find:
    given = {"end": END, "max_length": MOST, "width": width, "penalty": power(0.7)} | options
    return lambda session, prompts: beam(session, prompts, **given)


PROMPTED = [[START, 7, 5, 9], [START], [START, 3]]


@dataclass(frozen=True)
class Option:
    """A search, how wide it is, and what the sentences begin with."""

    find: Find
    width: int = 1
    prompts: Sequence[Sequence[int]] = ((START,),) * 3


OPTIONS: dict[str, Option] = {
    "greedy": Option(_one(greedy)),
    "greedy, banned": Option(_one(greedy, banned=[0, 7, 11], min_length=4)),
    "greedy, renormalized": Option(_one(greedy, banned=[0, 7, 11], renormalize=True)),
    "greedy, lengths": Option(_one(greedy, max_length=[2, 9, 5], min_length=[2, 0, 3])),
    "greedy, prompts": Option(_one(greedy), prompts=PROMPTED),
    "sampled": Option(_one(sample, seed=3, temperature=1.3, top_p=0.9)),
    "sampled, top k, banned": Option(
        _one(sample, seed=4, top_k=13, banned=[0, 7], renormalize=True, min_length=3),
        prompts=PROMPTED,
    ),
    "beams": Option(_beam(4), 4),
    "beams, the best few": Option(_beam(4, n_best=3, penalty=gnmt(0.6)), 4),
    "beams, banned": Option(_beam(3, banned=[0, 7, 11], min_length=3, n_best=2), 3),
    "beams, renormalized": Option(_beam(3, banned=[0, 7, 11], renormalize=True), 3),
    "beams, prompts": Option(_beam(3, max_length=[2, 9, 5]), 3, PROMPTED),
    "a beam that nobody announced": Option(_beam(3), 1),
    "a beam of one": Option(_beam(1)),
}


def table(kinds: Sequence[str]) -> list[Any]:
    """Every option with every kind of model: a third of them in `make test`, each in several."""
    return [
        pytest.param(name, kind, marks=[pytest.mark.slow] if (row + column) % 3 else [])
        for row, name in enumerate(OPTIONS)
        for column, kind in enumerate(kinds)
    ]


FEW = ["the paper's", "swiglu", "grouped heads", "rotary", "linear-bias", "language", "window"]
"""Kinds that use every kernel and every way around them."""


WALKED = ["the paper's", "linear-bias", "images", "window"]


def interpreted(kinds: Sequence[str]) -> list[Any]:
    """Every option with every kind of model; in `make test-kernels` a few, since a search takes
    seconds in the interpreter, and one by beams ten."""
    quick = [name for name, option in OPTIONS.items() if option.width == 1][:-1]
    default = {(quick[n], kind) for n, kind in enumerate(kind for kind in kinds if kind in FEW)}
    if kinds == list(MODELS):
        default.add(("beams, banned", FEW[0]))
    return [
        pytest.param(name, kind, marks=[] if (name, kind) in default else [pytest.mark.slow])
        for name in OPTIONS
        for kind in kinds
    ]


def made(config: TransformerConfig | LanguageConfig) -> Transformer | LanguageModel:
    """With weights so different that what is found does not hang by rounding."""
    torch.manual_seed(0)
    model = Transformer(config) if isinstance(config, TransformerConfig) else LanguageModel(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.2)
            else:
                parameter.copy_(0.2 * torch.randn_like(parameter) + ("norm.weight" in name))
    return model.eval()


def read(model: Transformer | LanguageModel, long: int = 11) -> dict[str, Any]:
    """What is read by three sentences of different lengths."""
    torch.manual_seed(1)
    if isinstance(model, LanguageModel):
        return {"rows": 3}
    match model.config.source:
        case ImageSource(image=(rows, columns), channels=channels):
            return {"source": torch.randn(3, channels, rows, columns)}
        case AudioSource(features=features):
            return {"source": torch.randn(3, long, features), "lengths": torch.tensor([4, long, 7])}
        case source:
            most = source.vocabulary or N
            ids = torch.randint(3, most, (3, long))
            return {"source": ids, "lengths": torch.tensor([4, long, 7])}


def on(device: str, given: dict[str, Any]) -> dict[str, Any]:
    return {key: x.to(device) if key == "source" else x for key, x in given.items()}


def same(have: list[list[Hypothesis]], want: list[list[Hypothesis]], tolerance: float) -> None:
    tokens = [[[h.tokens for h in best] for best in found] for found in (have, want)]
    assert tokens[0] == tokens[1]
    for one, two in zip(have, want):
        for a, b in zip(one, two):
            assert a.token_scores == pytest.approx(b.token_scores, abs=tolerance)
            assert a.score == pytest.approx(b.score, abs=tolerance)


def sentences(option: Option) -> list[list[int]]:
    return [list(prompt) for prompt in option.prompts]


# CUDA


@pytest.fixture
def cuda() -> Callable[[Any], Any]:
    """Makes an engine; in the interpreter, one whose graphs are not captured."""
    pytest.importorskip("triton")
    from regard.decode.engine.cuda.capture import CudaEngine

    def engine(model: Any) -> Any:
        assert CudaEngine.refusal(model) == ""
        return CudaEngine(model)

    return engine


pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, where it interprets


@pytest.mark.gpu
@pytest.mark.triton
@pytest.mark.parametrize(("name", "kind"), interpreted(list(MODELS)))
def test_cuda(name: str, kind: str, cuda: Any) -> None:
    option, model = OPTIONS[name], made(MODELS[kind]).to(DEVICE)
    given = on(DEVICE, read(model))
    want = option.find(EagerEngine().open(model, **given), sentences(option))
    with cuda(model).open(model, **given, beams=option.width, length=MOST + 5) as session:
        assert type(session).__name__ == "CudaSession"
        have = option.find(session, sentences(option))
    same(have, want, 2e-3)


@pytest.mark.gpu
@pytest.mark.triton
@pytest.mark.parametrize(
    "kind",
    [
        "language",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in WALKED),
    ],
)
def test_rows_join_leave_and_keep_their_logits(kind: str, cuda: Any) -> None:
    model = made(MODELS[kind]).to(DEVICE)
    engine = cuda(model)
    walk(model, lambda given: engine.open(model, **given, length=5), 2e-3)


@pytest.mark.gpu
@pytest.mark.triton
@pytest.mark.slow
def test_long_and_packed_sources(cuda: Any) -> None:
    model = made(TEXT).to(DEVICE)
    engine, option = cuda(model), OPTIONS["beams"]
    long = 37 if not CUDA else 1031
    given = on(DEVICE, read(model, long))
    want = option.find(EagerEngine().open(model, **given), sentences(option))
    lengths = given["lengths"]
    ends = torch.cat([row[:n] for row, n in zip(given["source"], lengths)])[None]
    for source, counts in ((given["source"], lengths), (ends, PackedLengths(lengths, DEVICE))):
        with engine.open(model, source, counts, beams=4, length=MOST + 1) as session:
            same(option.find(session, sentences(option)), want, 2e-3)


@pytest.mark.gpu
@pytest.mark.triton
@pytest.mark.slow
def test_spaces_are_used_again_and_weights_that_changed_are_seen(cuda: Any) -> None:
    model = made(TEXT).to(DEVICE)
    engine, option, given = cuda(model), OPTIONS["greedy"], on(DEVICE, read(model))

    def found() -> list[list[Hypothesis]]:
        with engine.open(model, **given, length=MOST + 1) as session:
            spaces.append(session.space)
            return option.find(session, sentences(option))

    spaces: list[object] = []
    before = found()
    assert found() == before
    with torch.no_grad():
        for name in ("query", "value"):
            getattr(model.decoder.blocks[0].attention, name).weight.mul_(-3)
        model.output.weight.mul_(1.5)
    assert engine.current(model)
    after = found()
    assert after != before
    same(after, option.find(EagerEngine().open(model, **given), sentences(option)), 2e-3)
    assert len(set(map(id, spaces))) == 1
    model.decoder.blocks[0].attention.query.weight = nn.Parameter(torch.zeros(64, 64).to(DEVICE))
    assert not engine.current(model)


@pytest.mark.gpu
@pytest.mark.triton
@pytest.mark.parametrize("kind", ["the paper's", "grouped heads", "language"])
def test_as_many_rows_as_it_names_fit(
    kind: str, cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made(MODELS[kind]).to(DEVICE)
    engine, given = cuda(model), on(DEVICE, read(model))
    with engine.open(model, **given, beams=3, length=40) as session:
        space = session.space
        parts = [space.logits, *(one.slots for one in space.own)]
        parts += [one.memory for one in space.memory]
        assert engine._bytes(space.size) == sum(part.nbytes for part in parts)
    monkeypatch.setattr(engine, "_memory", 8 * 40 * engine._bytes(space.size))
    for beams, length in ((1, 40), (3, 40), (4, 200)):
        rows = engine.rows(length)
        assert rows > beams
        source = torch.ones(rows // beams, length, dtype=torch.long)
        asked = (None, None, rows // beams) if kind == "language" else (source, None, 1)
        assert not engine._obstacle(engine._size(*asked, beams, length)[0])
        assert "the KV cache needs" in engine._obstacle(engine._size(*asked, 3 * beams, length)[0])


@pytest.mark.gpu
@pytest.mark.triton
def test_kept_spaces_take_no_more_than_their_share(
    cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made(TEXT).to(DEVICE)
    engine, given = cuda(model), on(DEVICE, read(model))
    for length in (64, 128, 160):
        engine.open(model, **given, length=length).close()
    kept = [size for size, free in engine._free.items() if free]
    assert len(kept) == 3
    monkeypatch.setattr(engine, "_memory", 8 * engine._bytes(kept[-1]))
    engine.open(model, **given, length=160).close()
    assert [size for size, free in engine._free.items() if free] == kept[1:]


@pytest.mark.gpu
@pytest.mark.triton
@pytest.mark.slow
def test_a_space_serves_smaller_batches(cuda: Any) -> None:
    model = made(TEXT).to(DEVICE)
    engine, given = cuda(model), on(DEVICE, read(model))
    large = {name: torch.cat([one, one]) for name, one in given.items()}
    with engine.open(model, **large, length=128) as session:
        for n in range(5):
            session.step(torch.full((session.rows,), 5 + n))
        size = session.space.size
    with engine.open(model, **given, length=64) as session:
        assert session.space.size == size
        reference = EagerEngine().open(model, **given)
        for n in range(9):
            have, want = (one.step(torch.full((3,), 4 + n)) for one in (session, reference))
            torch.testing.assert_close(have, want, atol=2e-3, rtol=2e-3)
    # Not if it would be much too large.
    with engine.open(model, **given, length=32) as session:
        assert session.space.size != size


@pytest.mark.gpu
@pytest.mark.triton
@pytest.mark.slow
@pytest.mark.parametrize("name", ["greedy", "beams", "beams, banned"])
def test_searches_find_the_same_in_a_larger_space(name: str, cuda: Any) -> None:
    model, option = made(TEXT).to(DEVICE), OPTIONS[name]
    engine, sizes = cuda(model), set()
    # Shorter sources after longer ones, fewer sentences after more, and the other way round.
    for long, often, length in ((61, 2, 64), (33, 1, 40), (50, 2, 64), (11, 1, 33), (61, 2, 64)):
        one = on(DEVICE, read(model, long))
        given = {key: torch.cat([part] * often) for key, part in one.items()}
        prompts = [*sentences(option)] * often
        want = option.find(EagerEngine().open(model, **given), prompts)
        with engine.open(model, **given, beams=option.width, length=length) as session:
            sizes.add(session.space.size)
            same(option.find(session, prompts), want, 2e-3)
    assert len(sizes) == 1


@pytest.mark.gpu
@pytest.mark.triton
@pytest.mark.parametrize("name", ["greedy", pytest.param("beams", marks=pytest.mark.slow)])
@pytest.mark.parametrize("rows", ["all", pytest.param("one", marks=pytest.mark.slow)])
def test_logits_that_are_not_finite_are_an_error(name: str, rows: str, cuda: Any) -> None:
    """In every row, or in the one row whose source holds the token."""
    option, model = OPTIONS[name], made(replace(TEXT, share="none")).to(DEVICE)
    given = on(DEVICE, read(model))
    with torch.no_grad():
        if rows == "all":
            model.decoder.blocks[0].add_feed_forward.norm.bias[7] = torch.nan
        else:
            model.source.table.weight[given["source"][0, 0]] = torch.nan
    with (
        pytest.raises(ValueError, match="the logits were not finite"),
        cuda(model).open(model, **given, beams=option.width, length=MOST + 5) as session,
    ):
        option.find(session, sentences(option))


@pytest.mark.gpu
@pytest.mark.triton
@pytest.mark.slow
def test_learned_positions_reach_to_their_end(cuda: Any) -> None:
    model = made(replace(TEXT, position="learned", share="none", length=13)).to(DEVICE)
    given = on(DEVICE, read(model))
    session, reference = cuda(model).open(model, **given), EagerEngine().open(model, **given)
    for n in range(13):
        have, want = (one.step(torch.full((3,), 5 + n)) for one in (session, reference))
    torch.testing.assert_close(have, want, atol=2e-3, rtol=2e-3)
    for one in (session, reference):
        with pytest.raises(ValueError, match="13"):
            one.step(torch.full((3,), 5))


@pytest.mark.gpu
@pytest.mark.triton
def test_inference_mode_may_come_and_go(cuda: Any) -> None:
    model = made(LANGUAGE).to(DEVICE)
    with torch.inference_mode():
        session = cuda(model).open(model, rows=2, length=3)
        session.step(torch.tensor([3, 4]))
        session.select(torch.tensor([1, 1, 0]))
    for n in range(3):
        logits = session.step(torch.tensor([5, 6, 7 + n]))
    assert torch.isfinite(logits).all()


@pytest.mark.gpu
def test_threads_have_spaces_of_their_own(cuda: Any) -> None:
    model = made(TEXT).cuda()
    engine = cuda(model)
    together(model, lambda given, width: engine.open(model, **given, beams=width, length=MOST + 1))


@pytest.mark.parametrize("kind", ["the paper's", "language"])
def test_a_fallback_to_the_eager_engine_is_shown(
    kind: str, cuda: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--verbose`, `/v1/models` and `regard check` show an engine's name and reason."""
    model = made(MODELS[kind])
    engine, given = cuda(model), read(model)
    assert (engine.name, engine.reason) == ("cuda", "the model's own modules, captured in a graph")
    session = engine.open(model, **given, beams=37)
    assert isinstance(session, EagerSession)
    shown = ("eager", "no graph is captured: beams (37) must be at most 32")
    assert (engine.name, engine.reason) == shown

    monkeypatch.setattr("regard.decode.engine.pick.pick", lambda _: engine)
    report_fallback(model, InferenceOptions(verbose=True))
    assert capsys.readouterr().err == f"regard: engine: eager ({shown[1]})\n"
    report_fallback(model, InferenceOptions())

    monkeypatch.setattr(engine, "_memory", 8 * 1000)
    engine.open(model, **given, length=64)
    assert "no graph is captured: the KV cache needs" in engine.reason
    assert "more than 1 kB" in engine.reason

    monkeypatch.setattr(engine, "_obstacle", lambda size: "")
    engine.lease = lambda size: 1 / 0  # a space would need Triton's interpreter
    with pytest.raises(ZeroDivisionError):
        engine.open(model, **given)
    assert engine.name == "cuda"
    report_fallback(model, InferenceOptions(verbose=True))
    assert capsys.readouterr().err == ""


@pytest.mark.gpu
def test_the_engine_of_the_latest_session_is_shown_on_a_gpu() -> None:
    model = made(TEXT).cuda()
    given = on("cuda", read(model))
    with torch.autocast("cuda", torch.bfloat16):
        open_session(model, **given).close()
    assert (pick(model).name, pick(model).reason) == (
        "eager",
        "no graph is captured: autocast is on",
    )
    open_session(model, **given, beams=37).close()
    assert (pick(model).name, "beams (37)" in pick(model).reason) == ("eager", True)
    open_session(model, **given, beams=3).close()
    assert pick(model).name == "cuda"


@pytest.mark.gpu
def test_what_a_gpu_gets() -> None:
    model = made(TEXT).cuda()
    assert pick(model).name == "cuda"
    assert pick(model) is pick(model)
    handle = model.decoder.register_forward_hook(lambda *_: None)
    assert (pick(model).name, "hook" in pick(model).reason) == ("eager", True)
    handle.remove()
    assert pick(model).name == "cuda"
    assert pick(model.double()).reason.endswith("float64 is for comparisons")
    recurrent = Transformer(TEXT, attention=lambda position: Recurrent(64)).cuda().eval()
    assert "a Recurrent keeps between steps" in pick(recurrent).reason
    with torch.autocast("cuda", torch.bfloat16):
        session = open_session(made(TEXT).cuda(), **on("cuda", read(model)))
        assert type(session).__name__ == "ReadingSession"


# 8 bits on a CPU


@pytest.fixture
def quantized() -> Callable[[Any], tuple[Any, Any]]:
    """Makes a model of 8 bits, and its engine."""
    from regard.decode.engine.int8.engine import Int8Engine

    def engine(config: TransformerConfig | LanguageConfig) -> tuple[Any, Any]:
        with warnings.catch_warnings(action="ignore"):
            model = int8(made(config))
        if "compiler" in (refusal := Int8Engine.refusal(model)):
            pytest.skip(refusal)
        return model, pick(model)

    return engine


KERNELS = [
    kind for kind in MODELS if "linear-bias" not in kind and kind != "window, rows and columns"
]


@pytest.mark.parametrize(("name", "kind"), table(KERNELS))
def test_int8(name: str, kind: str, quantized: Any) -> None:
    option = OPTIONS[name]
    model, engine = quantized(MODELS[kind])
    assert engine.name == "int8"
    given, modules = read(model), halved(model)
    have = option.find(engine.open(model, **given, beams=option.width), sentences(option))
    beside = Beside(engine.open(model, **given), EagerEngine().open(modules, **given))
    same(have, option.find(beside, sentences(option)), 1e-4)


class Beside(Session):
    """Two sessions, step by step: the first one's logits, which have to be near the second's."""

    def __init__(self, first: Session, second: Session):
        self.both, self.rows, self.vocabulary = (first, second), first.rows, first.vocabulary
        self.device = first.device

    def prefill(self, tokens: Tensor, counts: Tensor) -> None:
        for one in self.both:
            one.prefill(tokens, counts)

    def step(self, tokens: Tensor) -> Tensor:
        have, want = (one.step(tokens) for one in self.both)
        assert ((have - want).norm(dim=1) < 0.03 * want.norm(dim=1)).all()
        return have

    def select(self, rows: Tensor) -> None:
        for one in self.both:
            one.select(rows)
        self.rows = len(rows)


@pytest.mark.parametrize("kind", ["the paper's", "language", "images"])
def test_rows_join_leave_and_keep_their_logits_in_int8(kind: str, quantized: Any) -> None:
    model, engine = quantized(MODELS[kind])
    walk(model, lambda given: engine.open(model, **given), 0.3)


def test_threads_share_an_int8_engine(quantized: Any) -> None:
    model, engine = quantized(TEXT)
    together(model, lambda given, width: engine.open(model, **given, beams=width))


@pytest.mark.parametrize("kind", ["linear-bias", "language, linear-bias"])
def test_what_the_kernels_do_not_know_is_left_to_the_modules(kind: str, quantized: Any) -> None:
    model, engine = quantized(MODELS[kind])
    assert engine.name == "eager"
    assert "ALiBi" in engine.reason
    given = read(model)
    assert OPTIONS["greedy"].find(open_session(model, **given), [[START]] * 3)


# An ensemble of engines


@pytest.mark.parametrize(("name", "kind"), table(["the paper's", "images", "language"]))
def test_a_model_with_itself(name: str, kind: str) -> None:
    option, model = OPTIONS[name], made(MODELS[kind]).double()
    given = read(model)
    if "images" in kind:
        given["source"] = given["source"].double()
    want = option.find(open_session(model, **given), sentences(option))
    members = [open_session(model, **given, beams=option.width) for _ in range(3)]
    same(option.find(ensemble(members, [1, 2, 4]), sentences(option)), want, 1e-9)


@pytest.mark.parametrize("kind", ["the paper's", "language"])
@pytest.mark.parametrize("name", ["greedy, lengths", "sampled", "beams", "beams, prompts"])
def test_members_of_different_engines(name: str, kind: str, quantized: Any) -> None:
    """8 bits beside float32: the mean of what each finds by itself."""
    (eight, _), whole, option = quantized(MODELS[kind]), made(MODELS[kind]), OPTIONS[name]
    given = read(whole)

    def members() -> list[Session]:
        return [open_session(one, **given, beams=option.width) for one in (eight, whole)]

    assert (pick(eight).name, pick(whole).name) == ("int8", "eager")
    have = option.find(ensemble(members(), [1, 3]), sentences(option))
    same(have, option.find(Averaged(*members()), sentences(option)), 1e-5)


class Averaged(Beside):
    """A quarter of the first one's probabilities and three of the second's."""

    def step(self, tokens: Tensor) -> Tensor:
        one, two = (session.step(tokens).double().softmax(-1) for session in self.both)
        return (one / 4 + two * 3 / 4).log()


@pytest.mark.gpu
@pytest.mark.triton
@pytest.mark.parametrize(("name", "kind"), interpreted(["the paper's", "images", "language"]))
def test_an_ensemble_on_cuda(name: str, kind: str, cuda: Any) -> None:
    option, model = OPTIONS[name], made(MODELS[kind]).to(DEVICE)
    given, engine = on(DEVICE, read(model)), cuda(model)
    want = option.find(EagerEngine().open(model, **given), sentences(option))
    hints = {"beams": option.width, "length": MOST + 5}
    with ensemble([engine.open(model, **given, **hints) for _ in range(2)]) as session:
        same(option.find(session, sentences(option)), want, 2e-3)


@pytest.mark.parametrize("kind", ["the paper's", "language"])
def test_rows_join_and_leave_an_ensemble(kind: str) -> None:
    model = made(MODELS[kind])
    walk(model, lambda given: ensemble([open_session(model, **given) for _ in range(2)]), 1e-4)


# What all are put through


def walk(
    model: Transformer | LanguageModel, opened: Callable[[Any], Session], tolerance: float
) -> None:
    """A search of one's own, in which rows repeat, join, leave and outgrow what was foreseen."""
    reference = EagerEngine()
    given = on(next(model.parameters()).device.type, read(model))
    sessions = [opened(given), reference.open(model, **given)]
    kept: list[tuple[Tensor, Tensor]] = []

    def step(tokens: list[int]) -> None:
        have, want = (session.step(torch.tensor(tokens)) for session in sessions)
        logs = (logits.log_softmax(-1) for logits in (have, want))
        torch.testing.assert_close(*logs, atol=tolerance, rtol=tolerance)
        kept.append((have, have.clone()))

    for session in sessions:
        session.begin(PROMPTED)
    step([7, 8, 9])
    for rows in ([0, 0, 1, 1, 2, 2], [1, 0, 3, 3, 5, 4], [5, 0, 2]):
        for session in sessions:
            session.select(torch.tensor(rows))
        step([11 + n for n in range(len(rows))])
    others = [opened(given), reference.open(model, **given)]
    for other in others:
        other.begin([[START], [START, 5], [START, 6, 7]])
        other.step(torch.tensor([21, 22, 23]))
    for session, other in zip(sessions, others):
        session.join(other)
    for n in range(5):
        step([31 + n, 41, 42, 43, 44, 45])
    for session in sessions:
        session.select(torch.tensor([4, 2]))
    step([51, 52])
    for given_out, then in kept:  # the caller's: nobody wrote into them since
        assert torch.equal(given_out, then)


def together(model: Any, opened: Callable[[Any, int], Session]) -> None:
    """Several threads find what one finds after the other."""
    given = on(next(model.parameters()).device.type, read(model))
    names = ["greedy", "beams", "greedy, prompts", "beams, the best few"]

    def find(name: str) -> list[list[Hypothesis]]:
        option = OPTIONS[name]
        with opened(given, option.width) as session:
            return option.find(session, sentences(option))

    alone = {name: find(name) for name in names}
    found: dict[tuple[str, int], Any] = {}

    def work(name: str, turn: int) -> None:
        found[name, turn] = find(name)

    threads = [threading.Thread(target=work, args=(name, n)) for name in names for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == len(threads)
    for (name, _), have in found.items():
        assert have == alone[name]


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "forward": lambda module: module.register_forward_hook(lambda *_: None),
    "forward_pre": lambda module: module.register_forward_pre_hook(lambda *_: None),
    "full_backward": lambda module: module.register_full_backward_hook(lambda *_: None),
    "backward_pre": lambda module: module.register_full_backward_pre_hook(lambda *_: None),
    "every module's": lambda _: nn.modules.module.register_module_forward_hook(lambda *_: None),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_engines_look_for_every_kind_of_hook(kind: str) -> None:
    model = made(TEXT)
    handle = HOOKS[kind](model.decoder.blocks[0].feed_forward.activation)
    assert has_hooks(modules(model))
    handle.remove()
    assert not has_hooks(modules(model))
    norm = model.decoder.blocks[0].add_attention.norm
    norm.forward = norm.forward
    assert has_hooks(modules(model))


class Shifted(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


class Doubled(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return 2 * super().forward(ids)


@pytest.mark.gpu
@pytest.mark.triton
@pytest.mark.parametrize("kind", ["the paper's", "language"])
@pytest.mark.parametrize("path", ["attention.query", "feed_forward.expand", "table"])
def test_the_cuda_engine_calls_layers_of_another_class(path: str, kind: str, cuda: Any) -> None:
    model = made(MODELS[kind]).to(DEVICE)
    if path == "table":
        target(model).table.__class__ = Doubled
    else:
        model.decoder.get_submodule(f"blocks.0.{path}").__class__ = Shifted
    given, tokens = on(DEVICE, read(model)), torch.tensor([5, 6, 7], device=DEVICE)
    sessions = [one.open(model, **given, length=8) for one in (cuda(model), EagerEngine())]
    for _ in range(2):  # at the first step each query sees one key alone
        have, want = (session.step(tokens) for session in sessions)
        torch.testing.assert_close(have, want, rtol=1e-3, atol=1e-3)
