"""Several models, many who ask, one answer for each: the direct one."""

import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from pathlib import Path
from queue import SimpleQueue
from typing import Any, cast

import pytest
import torch
from torch import nn

from regard import checkpoint, load
from regard.decode.engine.eager import EagerEngine
from regard.decode.engine.int8 import library as native
from regard.model.encoder import TextEncoder
from regard.service import (
    Attend,
    Busy,
    Classify,
    Delta,
    Generate,
    Label,
    Late,
    Limits,
    Lost,
    Read,
    Refused,
    Service,
    TooLarge,
    Translate,
    Unknown,
)
from regard.service.models import load_served, served
from regard.service.served import Job, Served
from regard.service.translators import ServedTranslator
from regard.task.translator import Translator, cut_texts
from tests.processes import HANG, wait_until
from tests.service.samples import (
    BPE,
    TEXTS,
    classifier,
    generator,
    labeler,
    picture,
    reader,
    translator,
)

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    make: dict[str, Any] = {
        "words": translator,
        "stories": generator,
        "scans": reader,
        "kinds": classifier,
        "moods": labeler,
    }
    return {name: make[name](root / name) for name in make}


@pytest.fixture
def service(folders: dict[str, Path]) -> Iterator[Service]:
    with Service(Limits(seconds=600.0)) as service:
        for folder in folders.values():
            service.add(folder)
        yield service


class Gate:
    """Holds the thread that computes, so that a test decides when it goes on."""

    def __init__(self, service: Service, name: str):
        self.inside, self.open = threading.Event(), threading.Event()
        served = service._places[name].served
        assert served is not None
        self.turn = served.turn
        served.turn = self._turn  # type: ignore[method-assign]

    def _turn(self) -> int:
        self.inside.set()
        self.open.wait()
        return self.turn()


# Answers


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_answers_are_the_direct_ones(folders: dict[str, Path], precision: Any) -> None:
    if precision == "int8" and native.missing():
        pytest.skip("no compiler")
    direct = Translator.load(folders["words"])
    if precision == "int8":
        from regard.decode.engine.int8.linear import int8

        int8(direct.model)
    with Service(Limits(seconds=600.0), precision=precision) as service:
        service.add(folders["words"])
        count = sum(parameter.numel() for parameter in load(folders["words"]).model.parameters())
        assert service.models()[0].parameters == count
        asked = []
        for n, text in enumerate(TEXTS[:24]):
            asked.append(service.submit(Translate(texts=(text,), beams=(None, 1, 2)[n % 3])))
            if n % 5 == 0:
                time.sleep(0.003)
        for n, (text, future) in enumerate(zip(TEXTS, asked)):
            (have,) = future.result()
            (want,) = direct.hypotheses([text], beams=(None, 1, 2)[n % 3])
            assert have.text == want[0].text
            assert have.score == pytest.approx(want[0].score, abs=1e-5)


@pytest.mark.skipif(bool(native.missing()), reason="no compiler")
def test_texts_of_unlike_lengths_are_answered_together(tmp_path: Path) -> None:
    """From a few tokens to some hundred, by clients that come and go at any time."""
    folder = translator(tmp_path / "words", length=137)
    texts = ["x" * length for length in (1, 20, 33, 90, 131)]
    with Service(Limits(seconds=600.0), precision="int8") as service:
        service.add(folder)
        alone = {text: service.ask(Translate(texts=(text,))) for text in texts}
        failed: list[BaseException] = []

        def client(seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(5):
                chosen = rng.choices(texts, k=rng.choice((1, 3)))
                try:
                    found = service.ask(Translate(texts=tuple(chosen)))
                    assert found == tuple(alone[text][0] for text in chosen)
                except BaseException as error:
                    failed.append(error)

        clients = [threading.Thread(target=client, args=(seed,)) for seed in range(4)]
        for thread in clients:
            thread.start()
        for thread in clients:
            thread.join()
        assert failed == []


@pytest.mark.skipif(bool(native.missing()), reason="no compiler")
def test_logits_that_are_not_finite_fail_their_request_alone(folders: dict[str, Path]) -> None:
    """One token of the first text is NaN in the embeddings that are read."""
    first, undefined = TEXTS[0], BPE.encode(TEXTS[0])[0]
    others = [text for text in TEXTS if undefined not in BPE.encode(text)][:6]
    with Service(Limits(seconds=600.0), precision="int8") as service:
        for name in ("words", "stories"):
            service.add(folders[name])
        translates, writes = (
            cast(Served, service._places[name].served).model for name in ("words", "stories")
        )
        for tokens in (translates.source, writes.tokens):
            weight = tokens.table.weight.detach().clone()
            weight[undefined] = torch.nan
            tokens.table.weight = nn.Parameter(weight)
        requests: list[Callable[[str], Any]] = [
            *(lambda text, n=n: Translate(texts=(text,), beams=n) for n in (1, 3)),
            *(
                lambda text, t=t: Generate(prompts=(text,), length=1, temperature=t)
                for t in (0.0, 0.9)
            ),
        ]
        for request in requests:
            asked = [service.submit(request(text)) for text in (*others, first)]
            assert all(future.result()[0] for future in asked[:-1])
            with pytest.raises(ValueError, match="the logits were not finite"):
                asked[-1].result()


def test_the_engine_that_runs_is_shown(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """It changes if the picked engine cannot run a batch, and then runs in another."""

    def engines() -> dict[str, str]:
        return {about.name: about.engine for about in service.models()}

    assert engines()["words"].startswith("eager: torch.float32 on the CPU")
    fallen = EagerEngine("no graph is captured: beams (37) must be at most 32")
    monkeypatch.setattr("regard.service.writers.pick", lambda model: fallen)
    assert engines()["words"] == "eager: no graph is captured: beams (37) must be at most 32"


def test_every_kind_of_model(service: Service, folders: dict[str, Path]) -> None:
    direct: dict[str, Any] = {name: load(folder) for name, folder in folders.items()}
    images = tuple(map(picture, range(4)))
    prompts = tuple(TEXTS[:3])
    asked: list[Future[Any]] = [
        service.submit(Read(images=images)),
        service.submit(Classify(images=images, top=2)),
        service.submit(Label(texts=prompts, top=9)),
        service.submit(Generate(prompts=prompts, length=9, seed=3)),
        service.submit(Generate(prompts=prompts, length=9, temperature=0)),
        service.submit(Translate(texts=prompts, n_best=3)),
    ]
    read, kinds, moods, stories, plain, words = [future.result() for future in asked]
    assert list(read) == direct["scans"].read(images)
    probabilities = direct["kinds"].probabilities(images)
    for have, row in zip(kinds, probabilities):
        assert have[0].label == direct["kinds"].labels[int(row.argmax())]
        assert len(have) == 2
        assert have[0].probability == pytest.approx(float(row.max()), abs=1e-5)
    assert [have[0].label for have in moods] == direct["moods"].label(prompts)
    assert [len(have) for have in moods] == [3, 3, 3]
    assert list(stories) == direct["stories"].generate(prompts, length=9, seed=3)
    assert list(plain) == direct["stories"].generate(prompts, length=9, temperature=0)
    for have, want in zip(words, direct["words"].hypotheses(prompts, n_best=3)):
        assert [have.text, *(one.text for one in have.alternatives)] == [one.text for one in want]


def test_lines_are_kept_and_empty_texts_are_empty(
    service: Service, folders: dict[str, Path]
) -> None:
    direct = Translator.load(folders["words"])
    text = f" {TEXTS[0]}\n\n\t{TEXTS[1]} \n"
    found = service.ask(Translate(texts=(text, "", " \n ")))
    one, two = direct.translate(TEXTS[:2])
    assert [translation.text for translation in found] == [f" {one}\n\n\t{two} \n", "", " \n "]
    assert service.ask(Translate(texts=())) == ()


def test_a_long_text_is_cut_as_a_translator_cuts_it(
    service: Service, folders: dict[str, Path]
) -> None:
    direct = Translator.load(folders["words"])
    text = " ".join(TEXTS)[:390]
    assert len(cut_texts(direct, [text])[0]) > 1
    (found,) = service.ask(Translate(texts=(text,)))
    assert found.text == direct.translate([text])[0]


def test_markup_is_kept(service: Service, folders: dict[str, Path]) -> None:
    direct = Translator.load(folders["words"])
    (found,) = service.ask(Translate(texts=(f"<p>{TEXTS[0]}</p>",), markup=True))
    import html

    assert found.text == f"<p>{html.escape(direct.translate([TEXTS[0]])[0], quote=False)}</p>"


@pytest.mark.parametrize("beams", [1, 3])
def test_what_is_streamed_is_the_answer(service: Service, beams: int) -> None:
    heard: list[Delta] = []
    text = f"{TEXTS[3]}\n {TEXTS[4]}"
    found = service.ask(Translate(texts=(TEXTS[2], text), beams=beams), heard.append)
    for n, translation in enumerate(found):
        said = "".join(delta.text for delta in heard if delta.index == n)
        assert translation.text.startswith(said)
        assert said.rstrip("�") == translation.text.rstrip("�") or "�" in translation.text
    prompt = TEXTS[5]
    heard.clear()
    (story,) = service.ask(Generate(prompts=(prompt,), length=12), heard.append)
    assert story.startswith(prompt + "".join(delta.text for delta in heard)[:1])


def test_attention_of_a_request(service: Service, folders: dict[str, Path]) -> None:
    direct = Translator.load(folders["words"])
    found = service.ask(Attend(model="words", text=TEXTS[0]))
    assert found.text == direct.translate([TEXTS[0]])[0]
    weights = torch.tensor(found.weights)
    assert weights.shape[2:] == (len(found.target), len(found.source))
    torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:3]))
    given = service.ask(Attend(model="words", text=TEXTS[0], written=TEXTS[1]))
    assert given.text == TEXTS[1]
    seen = service.ask(Attend(model="scans", image=picture(0)))
    assert torch.tensor(seen.weights).shape[3:] == (3, 5)


# Many at once


def test_requests_take_turns(service: Service) -> None:
    """A request of many sentences does not keep others waiting until it is done."""
    gate = Gate(service, "words")
    many = service.submit(Translate(texts=tuple(TEXTS * 10)))
    gate.inside.wait()
    order: list[str] = []
    few = service.submit(Translate(texts=(TEXTS[0],)))
    many.add_done_callback(lambda _: order.append("many"))
    few.add_done_callback(lambda _: order.append("few"))
    gate.open.set()
    many.result()
    few.result()
    assert order == ["few", "many"]


def test_a_full_queue_refuses_and_says_for_how_long(folders: dict[str, Path]) -> None:
    with Service(Limits(queue=3, seconds=600.0)) as service:
        service.add(folders["words"])
        gate = Gate(service, "words")
        first = [service.submit(Translate(texts=(text,))) for text in TEXTS[:4]]
        gate.inside.wait()
        refused = service.submit(Translate(texts=(TEXTS[0],)))
        with pytest.raises(Busy, match="waiting") as error:
            refused.result()
        assert error.value.retry_after >= 1
        gate.open.set()
        assert all(future.result() for future in first[:3])
        assert service.ask(Translate(texts=(TEXTS[0],)))


def test_who_waits_for_captured_searches_enters_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regard.decode.engine.session.Session.shrinks", False)
    monkeypatch.setattr("regard.service.writers.GATHER", HANG)
    folder = translator(tmp_path / "en-de")
    want = load(folder).translate(TEXTS)
    served = load_served("en-de", folder, device="cpu", precision="fp32", version=1)
    assert isinstance(served, ServedTranslator)
    asked: list[Future[Any]] = [Future() for _ in TEXTS]
    entered = []
    for text, future in zip(TEXTS, asked):
        job = Job(Translate(texts=(text,)), future, time.monotonic() + HANG, None)
        served.take(job, Limits())
        if future is asked[0]:
            entered.append(served.turn())
    while served.busy:
        entered.append(served.turn())
        assert served.batch.cohorts <= 1
    assert [count for count in entered if count] == [1, len(TEXTS) - 1]
    assert [future.result()[0].text for future in asked] == want


def test_whoever_has_left_waits_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.service.writers.ROWS", 6)
    monkeypatch.setattr("regard.service.writers.SWEEP", -1.0)
    folder = translator(tmp_path / "en-de")
    served = load_served("en-de", folder, device="cpu", precision="fp32", version=1)
    assert isinstance(served, ServedTranslator)
    asked: list[Future[Any]] = [Future() for _ in range(3)]
    for n, future in enumerate(asked):
        texts = tuple(TEXTS[7 * n : 7 * n + 7])
        served.take(Job(Translate(texts=texts), future, time.monotonic() + HANG, None), Limits())
    assert served.waiting == 21
    begun = served.turn()
    assert served.waiting == 21 - begun > 14
    assert asked[1].cancel()
    served.turn()
    assert served.waiting <= 14
    while served.busy:
        served.turn()
    assert served.waiting == 0
    assert all(len(future.result()) == 7 for future in (asked[0], asked[2]))
    served.take(Job(Translate(texts=("a", "b")), asked[1], 0.0, None), Limits())
    served.give_up(Lost("over"))
    assert (served.waiting, served.busy) == (0, False)


def test_no_more_rows_run_than_the_engine_takes_at_once(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EagerEngine, "rows", lambda self, length: 7)
    want = load(folders["words"]).translate(TEXTS[:9])
    served = load_served("words", folders["words"], device="cpu", precision="fp32", version=1)
    assert isinstance(served, ServedTranslator)
    asked: Future[Any] = Future()
    job = Job(Translate(texts=tuple(TEXTS[:9])), asked, time.monotonic() + HANG, None)
    served.take(job, Limits())
    rows = []
    while served.busy:
        served.turn()
        rows.append(served.batch.rows)
    assert [answer.text for answer in asked.result()] == want
    assert max(rows) == 6  # two sentences of three beams each


def test_a_request_that_is_cancelled_leaves(service: Service) -> None:
    gate = Gate(service, "words")
    kept = service.submit(Translate(texts=(TEXTS[0],)))
    gate.inside.wait()
    gone = service.submit(Translate(texts=tuple(TEXTS)))
    assert gone.cancel()
    gate.open.set()
    assert kept.result()
    with pytest.raises(CancelledError):
        gone.result()
    wait_until(lambda: not service._active)
    assert service.counts.sentences == 1


def test_a_request_that_is_late_is_given_up(service: Service) -> None:
    gate = Gate(service, "words")
    late = service.submit(Translate(texts=(TEXTS[0],), seconds=0.01))
    gate.inside.wait()
    time.sleep(0.05)
    gate.open.set()
    with pytest.raises(Late, match="in time"):
        late.result()
    assert service.ask(Translate(texts=(TEXTS[0],)))


def test_a_model_that_fails_fails_its_requests_alone(
    service: Service, folders: dict[str, Path]
) -> None:
    served = service._places["words"].served
    assert isinstance(served, ServedTranslator)

    def broken(*given: Any) -> None:
        raise RuntimeError("broken")

    handle = served.model.decoder.register_forward_pre_hook(broken)
    with pytest.raises(RuntimeError, match="broken"):
        service.ask(Translate(texts=(TEXTS[0],)))
    handle.remove()
    assert service.ask(Label(texts=(TEXTS[0],)))
    direct = Translator.load(folders["words"])
    (found,) = service.ask(Translate(texts=(TEXTS[0],)))
    assert found.text == direct.translate([TEXTS[0]])[0]


def test_an_error_of_the_engine_is_no_refusal(service: Service) -> None:
    served = service._places["words"].served
    assert isinstance(served, ServedTranslator)

    def broken(*given: Any) -> None:
        raise ValueError("shapes differ")

    handle = served.model.decoder.register_forward_pre_hook(broken)
    with pytest.raises(ValueError, match="shapes differ") as raised:
        service.ask(Translate(texts=(TEXTS[0],)))
    handle.remove()
    assert not isinstance(raised.value, Refused)
    with pytest.raises(TooLarge, match="the size of the vocabulary"):
        served.check(Translate(texts=("a",), beams=BPE.size + 1), Limits(beams=10**4))


# Models


def test_names(service: Service, folders: dict[str, Path]) -> None:
    assert [about.name for about in service.models()] == sorted(folders)
    assert {about.task for about in service.models()} == {
        *("translate", "generate", "read", "classify", "label")
    }
    with pytest.raises(ValueError, match=r"two models named words.*NAME=FOLDER"):
        service.add(folders["words"])
    service.add(folders["words"], "other")
    with pytest.raises(Unknown, match=r"several models can translate.*other, words"):
        service.ask(Translate(texts=("ab",)))
    with pytest.raises(Unknown, match="no such model; there are kinds"):
        service.ask(Translate(texts=("ab",), model="nothing"))
    with pytest.raises(Unknown, match="'moods' is for label; it cannot translate"):
        service.ask(Translate(texts=("ab",), model="moods"))
    with pytest.raises((ValueError, OSError)):
        service.add(folders["words"] / "nothing")
    assert "nothing" not in {about.name for about in service.models()}


def test_a_folder_is_loaded_again_without_dropping_a_request(tmp_path: Path) -> None:
    folder = translator(tmp_path / "words", seed=1)
    old: Any = load(folder)
    with Service(Limits(seconds=600.0)) as service:
        service.add(folder)
        gate = Gate(service, "words")
        before = service.submit(Translate(texts=tuple(TEXTS)))
        gate.inside.wait()
        translator(folder, seed=2)
        new: Any = load(folder)
        assert service.reload("words").result().version == 2
        after = service.submit(Translate(texts=tuple(TEXTS)))
        gate.open.set()
        assert [one.text for one in before.result()] == old.translate(TEXTS)
        assert [one.text for one in after.result()] == new.translate(TEXTS)
        assert old.translate(TEXTS) != new.translate(TEXTS)


@pytest.mark.parametrize("damage", ["truncated", "gone", "flipped"])
def test_a_damaged_folder_keeps_the_old_model(tmp_path: Path, damage: str) -> None:
    folder = translator(tmp_path / "words", seed=1)
    want = load(folder).translate(TEXTS[:5])
    with Service(Limits(seconds=600.0)) as service:
        service.add(folder)
        weights = folder / "model.safetensors"
        content = bytearray(weights.read_bytes())
        match damage:
            case "truncated":
                weights.write_bytes(content[: len(content) // 2])
            case "flipped":
                content[-9] ^= 64
                weights.write_bytes(content)
            case _:
                shutil.rmtree(folder)
        with pytest.raises((ValueError, OSError)):
            service.reload("words").result()
        found = service.ask(Translate(texts=tuple(TEXTS[:5])))
        assert [one.text for one in found] == want
        assert service.models()[0].version == 1


def test_memory_is_bounded_and_models_come_back(folders: dict[str, Path]) -> None:
    sizes = {
        name: (folders[name] / "model.safetensors").stat().st_size for name in ("words", "stories")
    }
    limit = max(sizes.values()) + min(sizes.values()) - 1
    with Service(Limits(seconds=600.0), memory_limit=limit) as service:
        for name in sizes:
            service.add(folders[name])
        assert [about.loaded for about in service.models()] == [True, False]  # stories, words
        assert service.ask(Translate(model="words", texts=(TEXTS[0],)))
        assert [about.loaded for about in service.models()] == [False, True]
        assert service.ask(Generate(model="stories", prompts=(TEXTS[0],), length=3))
        assert [about.loaded for about in service.models()] == [True, False]
        with pytest.raises(ValueError, match=r"more than the limit.*raise it"):
            Service(memory_limit=100).add(folders["words"])


def test_a_model_that_is_at_work_is_not_let_go(folders: dict[str, Path]) -> None:
    sizes = [(folders[name] / "model.safetensors").stat().st_size for name in ("words", "stories")]
    with Service(Limits(seconds=600.0), memory_limit=sum(sizes) - 1) as service:
        service.add(folders["stories"])
        service.add(folders["words"])
        gate = Gate(service, "words")
        running = service.submit(Translate(model="words", texts=(TEXTS[0],)))
        gate.inside.wait()
        with pytest.raises(Busy, match="at work"):
            service.ask(Generate(model="stories", prompts=(TEXTS[0],)))
        gate.open.set()
        assert running.result()
        wait_until(lambda: not service._active)
        assert service.ask(Generate(model="stories", prompts=(TEXTS[0],), length=2))


# Limits


@pytest.mark.parametrize(
    ("request_", "error", "words"),
    [
        (Translate(texts=("a" * 101,)), TooLarge, "101 characters"),
        (Translate(texts=("a",) * 8), TooLarge, "8 at once"),
        (Translate(texts=("a",), beams=9), TooLarge, r"beams \(9\) must be at most 8"),
        (Translate(texts=("a",), n_best=9), TooLarge, "beams"),
        (Translate(texts=("a\ud800",)), Refused, "surrogate"),
        (Generate(prompts=("a",), length=31), TooLarge, r"length \(31\)"),
        (Generate(prompts=("a" * 101,)), TooLarge, "characters"),
        (Classify(images=(b"GIF89a",)), Refused, "none of PNG, JPEG"),
        (Classify(images=(b"",)), Refused, "none of"),
        (Read(images=(picture(0, (33, 33)),)), TooLarge, "33 × 33 pixels"),
        (Classify(images=(b"\x89PNG" + b"0" * 5000,)), TooLarge, "5,004 bytes"),
        (Attend(model="words"), Refused, "give one"),
        (Attend(model="scans"), Refused, "give one"),
    ],
)
def test_what_is_too_large_or_wrong_is_refused(
    folders: dict[str, Path], request_: Any, error: type[Exception], words: str
) -> None:
    limits = Limits(
        characters=100, texts=7, beams=8, tokens=30, pixels=1000, image_bytes=5000, seconds=600.0
    )
    with Service(limits) as service:
        for folder in folders.values():
            service.add(folder)
        with pytest.raises(error, match=words):
            service.ask(request_)


def test_a_text_beyond_the_learned_positions_is_refused(tmp_path: Path) -> None:
    with Service(Limits(seconds=600.0)) as service:
        service.add(translator(tmp_path / "words", positions=17))
        long, short = " ".join(TEXTS[:9]), TEXTS[0][:9]
        longer = Attend(text=short, written="x" * 3000)
        with pytest.raises(TooLarge, match="computed for at most 1,024"):
            service.ask(longer)
        assert service.ask(Attend(text=short, written=short)).weights
        for request in (Attend(text=long, written=short), Attend(text=short, written=long)):
            with pytest.raises(TooLarge, match="and the model has 17 positions"):
                service.ask(request)


def test_settings_that_cannot_be() -> None:
    for wrong in ({"beams": 0}, {"seconds": 0.0}, {"queue": -1}):
        with pytest.raises(ValueError, match="must be"):
            Limits(**wrong)  # type: ignore[arg-type]
    for sampling in ({"temperature": -1.0}, {"top_p": 0.0}, {"top_k": 0}, {"seed": -1}):
        with pytest.raises(Refused):
            Generate(prompts=("a",), **sampling)  # type: ignore[arg-type]


def test_closing_finishes_what_is_there_and_refuses_the_rest(folders: dict[str, Path]) -> None:
    service = Service(Limits(seconds=600.0))
    service.add(folders["words"])
    asked = [service.submit(Translate(texts=(text,))) for text in TEXTS]
    service.close(drain=True)
    assert all(future.result() for future in asked)
    with pytest.raises(Busy, match="closing"):
        service.ask(Translate(texts=("ab",)))


def test_closing_at_once_loses_and_says_so(folders: dict[str, Path]) -> None:
    service = Service(Limits(seconds=600.0))
    service.add(folders["words"])
    gate = Gate(service, "words")
    asked = [service.submit(Translate(texts=(text,))) for text in TEXTS]
    gate.inside.wait()
    closing = threading.Thread(target=service.close, kwargs={"drain": False})
    closing.start()
    gate.open.set()
    closing.join()
    with pytest.raises(Lost, match="closed"):
        asked[-1].result()


def test_only_the_compute_thread_touches_what_is_running(service: Service) -> None:
    """Kernels write into arrays that `give_up` frees."""
    served = service._places["words"].served
    assert isinstance(served, ServedTranslator)
    threads: list[threading.Thread] = []
    clear = served.batch.clear

    def cleared(error: Exception) -> None:
        threads.append(threading.current_thread())
        clear(error)

    served.batch.clear = cleared  # type: ignore[method-assign]
    gate = Gate(service, "words")
    asked = [service.submit(Translate(texts=(text,))) for text in TEXTS[:5]]
    gate.inside.wait()
    closing = [threading.Thread(target=service.close, args=(False,)) for _ in range(3)]
    for thread in closing:
        thread.start()
    gate.open.set()
    for thread in closing:
        thread.join()
    assert threads == [service._thread]
    assert all(isinstance(future.exception(), Lost) for future in asked)


@pytest.mark.parametrize("drain", [True, False])
def test_a_stream_may_close_the_service(folders: dict[str, Path], drain: bool) -> None:
    service = Service(Limits(seconds=600.0))
    service.add(folders["words"])

    def close(delta: Delta) -> None:
        service.close(drain)

    streamed = service.submit(Translate(texts=(TEXTS[0],), beams=1), close)
    assert isinstance(streamed.exception(), type(None) if drain else Lost)
    service._thread.join(HANG)
    assert not service._thread.is_alive()
    service.close()


def test_a_request_that_comes_after_the_last_is_refused(folders: dict[str, Path]) -> None:
    """Checked before the service was closed, and taken in afterwards."""
    service = Service(Limits(seconds=600.0))
    service.add(folders["words"])
    service._check_open = service.close  # type: ignore[method-assign]
    for future in (
        service.submit(Translate(texts=(TEXTS[0],))),
        service.submit(Read(model="words", images=(b"",))),
        service.inspect("words", lambda predictor: None),
    ):
        assert isinstance(future.exception(HANG), Lost | Busy | Unknown)


EXIT = """
import os, sys, time
from regard import load
from regard.service import Limits, Service, Translate

load(sys.argv[1])  # all that is imported for it

def leave():
    service = Service(Limits(seconds=600.0), precision="int8")
    service.add(sys.argv[1])
    service.submit(Translate(texts=("x" * 97,) * 80, beams=5))
    while service.counts.steps < 3:
        time.sleep(0.001)

for _ in range(int(sys.argv[2])):
    if not (child := os.fork()):
        leave()
        sys.exit()
    if status := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        sys.exit(f"ended by {status}")
"""


@pytest.mark.skipif(bool(native.missing()), reason="no compiler")
@pytest.mark.parametrize("times", [2, pytest.param(30, marks=pytest.mark.slow)])
def test_a_script_may_exit_with_requests_in_flight(tmp_path: Path, times: int) -> None:
    """Freed memory is overwritten at once, so that a kernel that still uses it is noticed."""
    folder = translator(tmp_path / "words", length=137)
    done = subprocess.run(
        [sys.executable, "-c", EXIT, folder, str(times)],
        env={**os.environ, "MALLOC_PERTURB_": "165", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_model_of_another_kind_is_refused(tmp_path: Path) -> None:
    from regard import Transformer, checkpoint

    model: nn.Module = Transformer.tiny(50)
    checkpoint.save(tmp_path / "alone", model)
    with (
        Service() as service,
        pytest.raises(ValueError, match="names no task"),
    ):
        service.add(tmp_path / "alone")


def test_an_encoder_answers_nothing_by_itself(tmp_path: Path) -> None:
    model = TextEncoder.tiny(BPE.size)
    files = {"tokenizer.json": BPE.to_bytes()}
    checkpoint.save(tmp_path / "encoder", model, files=files, task={"name": "encoder"})
    with pytest.raises(ValueError, match="answers nothing by itself; serve what starts from it"):
        served("encoder", tmp_path / "encoder", load(tmp_path / "encoder"), 1)


def test_who_is_late_is_told_before_it_would_be_their_turn(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regard.service.writers.SWEEP", 0.0)
    gate = Gate(service, "words")
    first = service.submit(Translate(texts=tuple(TEXTS), beams=16))
    gate.inside.wait()
    order = SimpleQueue[str]()
    late = service.submit(Translate(texts=tuple(TEXTS), seconds=0.01))
    first.add_done_callback(lambda _: order.put("first"))
    late.add_done_callback(lambda _: order.put("late"))
    time.sleep(0.05)
    gate.open.set()
    first.result()
    with pytest.raises(Late):
        late.result()
    # Who waits for a result may go on before its callback is called.
    assert [order.get(timeout=HANG) for _ in range(2)] == ["late", "first"]
