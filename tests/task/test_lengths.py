"""Long lines end soon, or are refused by their length, in Python, commands and services."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.cli.main import main
from regard.look import align
from regard.service import Attend, Limits, Service
from regard.service.requests import TooLarge
from regard.task.inspect.views import view
from regard.task.load import load
from regard.task.search import MAX_TOKENS
from regard.task.translator import Translator
from tests.service.samples import BPE, generator, picture, reader, translator
from tests.task.samples import lines

LONG = "ab cd efg hij " * 1429
"""20,006 characters."""
TOKENS = len(BPE.encode(LONG.strip()))
SPACED = len(BPE.encode(LONG))
REFUSED = r"has 5,71\d tokens, and a score or attention weights .* at most 1,024; split it"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return translator(tmp_path_factory.mktemp("lengths") / "words", beams=1)


@pytest.fixture
def words(folder: Path) -> Translator:
    ready = load(folder)
    assert isinstance(ready, Translator)
    return ready


class Sizes:
    """The tokens of each forward pass."""

    def __init__(self, model: Any):
        self.sources, self.logits = list[int](), list[int]()
        model.source.register_forward_pre_hook(self._source)
        model.output.register_forward_hook(self._output)

    def _source(self, _: Any, inputs: tuple[Any, ...]) -> None:
        self.sources.append(inputs[0].numel())

    def _output(self, _: Any, __: Any, y: torch.Tensor) -> None:
        self.logits.append(y.shape[:-1].numel())


def test_aligning_a_long_line_reads_a_few_times_its_tokens(words: Translator) -> None:
    """Each word of it used to be left out in turn, of copies as long as the model reads."""
    text = LONG[:3500]
    tokens, count, most = len(BPE.encode(text)), len(text.split()), align.MAX_TOKENS
    sizes = Sizes(words.model)
    (best,) = words.translations([text], align=True)
    assert best[0].alignment
    assert {source for source, _ in best[0].alignment} <= set(range(count))
    assert sum(sizes.sources) < 5 * tokens + align.TRIED * (most + 1)
    assert max(sizes.logits) <= (most + 1) ** 2
    # Attention is computed for several parts of the line at once.
    assert len(sizes.sources) < tokens / words.search.length


def test_the_head_is_chosen_by_the_beginning_of_long_examples() -> None:
    n = 3 * align.MAX_TOKENS
    example = align.Example(range(n), range(2 * n), [-1, *range(5, n + 4)], [0] * 2 * n)
    short = align._truncate(example)
    assert short == align.Example(range(16), range(32), [-1, *range(15)], [0] * 32)
    assert align._truncate(short) == short


@pytest.mark.parametrize(
    "ask",
    [
        lambda words: words.score([("ab", "cd"), (LONG, "ab")]),
        lambda words: words.score([("ab", LONG)]),
        lambda words: words.attention(LONG, "ab"),
        lambda words: words.attention("ab", LONG),
        lambda words: words.attention("ab", [5] * TOKENS),
        lambda words: list(words.translations(["ab", LONG], attention=True)),
        lambda words: words.ensemble([words]).score([(LONG, "ab")]),
    ],
)
def test_scores_and_attention_of_a_long_line_are_refused(
    words: Translator, ask: Callable[[Translator], object]
) -> None:
    sizes = Sizes(words.model)
    with pytest.raises(ValueError, match=REFUSED):
        ask(words)
    assert max(sizes.sources, default=0) < 100


def test_a_model_of_longer_texts_reads_longer_texts(tmp_path: Path) -> None:
    ready: Any = load(translator(tmp_path / "long", length=2 * MAX_TOKENS))
    text = "ab " * (MAX_TOKENS + 300)
    tokens = len(BPE.encode(text.strip()))
    assert MAX_TOKENS < tokens <= 2 * MAX_TOKENS
    (found,) = ready.score([("ab", text)])
    assert len(found.token_scores) == tokens + 1


def test_batches_of_scores_have_a_limit_in_tokens(words: Translator) -> None:
    pairs = [("ab cd " * n, "ab " * 2 * n) for n in (200, 2, 210, 3, 1, 220)]
    sizes = Sizes(words.model)
    together = words.score(pairs, batch=7)
    assert len(sizes.sources) > 1
    assert max(sizes.logits) <= max(64 * 7, 2 * 220 + 1)
    for pair, one in zip(pairs, together):
        (alone,) = words.score([pair])
        assert one.token_scores == pytest.approx(alone.token_scores, abs=1e-3)


@pytest.mark.usefixtures("unchecked")
def test_commands_leave_long_lines_out_by_name(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = lines(tmp_path / "pairs.tsv", ["ab\tcd", f"{LONG}\tab", "efg\thij"])
    status = main(["score", str(folder), "--device", "cpu", pairs])
    out, err = capsys.readouterr()
    rows = out.splitlines()
    assert (status, len(rows)) == (1, 3)
    assert float(rows[0]) < 0
    assert float(rows[2]) < 0
    assert f"the text has {TOKENS:,} tokens" in err

    table = lines(tmp_path / "table", ["ab", LONG[:1000], "cd"])
    assert main(["translate", str(folder), "--device", "cpu", "--align", table]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3

    stories = generator(tmp_path / "stories")
    assert main(["look", str(stories), "--device", "cpu", "--text", LONG]) != 0
    assert f"regard: the text has {SPACED:,} tokens" in capsys.readouterr().err
    assert main(["look", str(folder), "--device", "cpu", "--text", LONG]) == 0
    with pytest.raises(ValueError, match="at most 1,024; split it"):
        view(load(stories), LONG)


def test_a_reader_is_not_made_to_write_a_long_text(tmp_path: Path) -> None:
    ready: Any = load(reader(tmp_path / "scans"))
    with pytest.raises(ValueError, match=REFUSED):
        ready.attention(picture(0), LONG)


# Services


@pytest.fixture(scope="module")
def service(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(Limits(characters=30_000, seconds=600.0, weights=4 * 37**2)) as service:
        service.add(folder)
        service.add(reader(tmp_path_factory.mktemp("scans") / "scans"))
        yield service


@pytest.mark.parametrize(
    ("request_", "shape"),
    [
        (Attend(model="words", text=LONG), f"{TOKENS + 1:,} to {TOKENS + 1:,}"),
        (Attend(model="words", text="ab", written=LONG), f"{SPACED + 1:,} to 2"),
        (Attend(model="scans", image=picture(0), written=LONG), f"{SPACED + 1:,} to 15"),
    ],
)
def test_attention_of_too_many_weights_is_refused_before_it_is_computed(
    service: Service, request_: Attend, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for served in (service._places[name].served for name in ("words", "scans")):
        assert served is not None
        monkeypatch.setattr(served, "_attention", lambda *_: pytest.fail("computed"))
    with pytest.raises(TooLarge, match=rf"^attention of {shape} tokens, .*at most 5,476; send"):
        service.ask(request_)


def test_attention_of_what_was_written_is_limited_too(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "ab cd"
    seen = service.ask(Attend(model="words", text=text))
    layers, heads, L, S = torch.tensor(seen.weights).shape
    monkeypatch.setattr(service, "limits", Limits(weights=layers * heads * S * S))
    if L > S:
        with pytest.raises(TooLarge, match=rf"attention of {L} to {S} tokens"):
            service.ask(Attend(model="words", text=text))


def test_attention_that_waits_is_counted(service: Service) -> None:
    served: Any = service._places["words"].served
    served.calls.append((None, lambda: None))
    try:
        assert served.waiting == 1
    finally:
        served.calls.clear()
