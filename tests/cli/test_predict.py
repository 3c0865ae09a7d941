"""The real command in a real pipe: a line for each line, soon, in order, by one process or two."""

import bz2
import gzip
import io
import json
import lzma
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from regard import checkpoint
from regard.cli.main import main
from regard.cli.stream import Lines, Unreadable, answers
from regard.data.tokenizer import Tokenizer
from regard.decode.engine.int8 import library as native
from regard.machine.processes import Processes
from regard.task.load import load
from regard.task.search import SearchSettings
from regard.task.text import build_transformer
from regard.task.translator import Translator
from tests.processes import HANG
from tests.task.samples import SHAPE, sentences

ROOT = Path(__file__).parents[2]
REGARD = [sys.executable, "-m", "regard"]

BAD = [
    b"ab cd",
    b"",
    b"   \t ",
    b"carriage\rreturn\r",
    b"nul \x00 bell \x07 escape \x1b[31m",
    "line\u2028separator \u2029 next\x85line \x0b\x0c\x1c".encode(),
    "漢字 Ελληνικά עברית 😀👩‍👩‍👧 \U000e0041".encode(),
    b"long " * 400,
    b"x" * 3000,
    b"</s> <pad> ||| \\n",
    "\ufeffmark".encode(),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A translator that has learned nothing, and says much."""
    tokenizer = Tokenizer.bpe(sentences(50), 300)
    model = build_transformer(replace(SHAPE, decoder_layers=2), (tokenizer, tokenizer), seed=3)
    settings = SearchSettings.of(tokenizer, beams=2, length=40)
    task = {"name": "translate", **settings.__dict__, "banned": list(settings.banned)}
    place = tmp_path_factory.mktemp("models") / "model"
    checkpoint.save(place, model, files={"tokenizer.json": tokenizer.to_bytes()}, task=task)
    return place


def environment() -> dict[str, str]:
    # No locale and one thread, as in many a container.
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "LC_ALL": "C"}


def piped(words: list[Any], given: bytes, status: int = 0) -> tuple[bytes, str]:
    done = subprocess.run(
        [*REGARD, *map(str, words)],
        input=given,
        env=environment(),
        capture_output=True,
        check=False,
    )
    assert done.returncode == status, done.stderr.decode()
    return done.stdout, done.stderr.decode()


@contextmanager
def running(words: list[Any]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [*REGARD, *map(str, words)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    try:
        yield process
    finally:
        process.kill()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()
        process.wait()


def test_every_bad_line_comes_out_as_one_line(folder: Path) -> None:
    out, said = piped(
        ["translate", folder, "--scores", "--align", "--precision", "fp32"], b"\n".join(BAD)
    )
    assert said.startswith("regard: word alignments are those of head ")
    assert said.count("\n") == 1
    lines = out.decode().split("\n")  # UTF-8, and never another end of a line
    assert lines.pop() == ""
    assert len(lines) == len(BAD)
    assert all(len(line.splitlines()) == 1 for line in lines)
    assert lines[1] == lines[2] == " ||| 0 |||  ||| "
    for given, line in zip(BAD, lines):
        text, log_p, tokens, alignment = line.rsplit(" ||| ", 3)
        assert float(log_p) == pytest.approx(sum(map(float, tokens.split())), rel=1e-4)
        sources, targets = len(given.decode(errors="replace").split()), len(text.split())
        pairs = [tuple(map(int, pair.split("-"))) for pair in alignment.split()]
        assert [target for _, target in sorted(pairs, key=lambda p: p[1])] == list(range(targets))
        assert all(0 <= source < sources for source, _ in pairs)


def test_a_line_in_a_pipe_is_answered_at_once_and_a_reader_may_leave(folder: Path) -> None:
    with running(["translate", folder]) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        guard = threading.Timer(HANG, process.kill)
        guard.start()
        for text in (b"ab cd\n", b"\n", b"efg\n"):
            process.stdin.write(text)
            process.stdin.flush()
            assert process.stdout.readline().endswith(b"\n")  # while the pipe stays open
        process.stdout.close()  # as head does
        process.stdin.write(b"ab\n" * 50)
        process.stdin.close()
        assert process.wait() == 141
        assert process.stderr.read() == b""
        guard.cancel()


def test_a_line_that_cannot_be_read_keeps_its_place(folder: Path) -> None:
    given = b"ab cd\nno \xff\n" + b"x" * 300 + b"\nefg"
    limit = ["--longest", 200, "--beams", 1]
    out, said = piped(["translate", folder, *limit], given, status=1)
    lines = out.decode().split("\n")
    assert lines[1:3] == ["", ""]
    assert lines[0]
    assert lines[3]
    assert said.splitlines() == [
        "regard: left out: line 2: byte 4 (0xff) is not UTF-8; convert it, as iconv does",
        "regard: left out: line 3 has more than 200 characters (--longest); split it at sentences",
    ]
    out, _ = piped(["translate", folder, *limit, "--json"], given, status=1)
    rows = [json.loads(line) for line in out.decode().splitlines()]
    assert [row["line"] for row in rows] == [0, 1, 2, 3]
    assert "not UTF-8" in rows[1]["error"]
    assert "translations" in rows[3]


# Two processes


def torchrun(words: list[Any], given: bytes) -> subprocess.CompletedProcess[bytes]:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return subprocess.run(
        [*start, "-m", "regard", *map(str, words)],
        input=given,
        env=environment(),
        capture_output=True,
        check=False,
        timeout=HANG,
    )


@pytest.mark.slow
def test_two_processes_write_what_one_writes(folder: Path) -> None:
    given = "\n".join(sentences(301, seed=5)).encode() + b"\n" + b"\n".join(BAD)
    words = ["translate", folder, "--n-best", 2, "--align", "--precision", "fp32"]
    alone, note = piped(words, given)
    done = torchrun(words, given)
    assert done.returncode == 0, done.stderr.decode()
    have, want = (text.decode().splitlines() for text in (done.stdout, alone))
    assert len(have) == len(want)
    for one, two in zip(have, want):  # other batches round the last digit of a score otherwise
        *text, score, alignment = one.rsplit(" ||| ", 2)
        *text_, score_, alignment_ = two.rsplit(" ||| ", 2)
        assert (text, alignment) == (text_, alignment_)
        assert float(score) == pytest.approx(float(score_), rel=1e-4)
    assert done.stderr.decode().count("regard: ") == 1
    assert note in done.stderr.decode()


@pytest.mark.slow
def test_what_is_wrong_in_processes_is_said_once(folder: Path, tmp_path: Path) -> None:
    done = torchrun(["translate", tmp_path / "nowhere"], b"ab\n")
    assert done.returncode != 0
    said = [line for line in done.stderr.decode().splitlines() if line.startswith("regard:")]
    assert len(said) == 1
    assert "nowhere does not exist" in said[0]


class Mailbox(Processes):
    """Messages wait until they are fetched, and processes are threads."""

    def send(self, rank: int, message: Any) -> None:
        self.__dict__["post"][self.rank, rank].put(json.dumps(message))

    def receive(self, rank: int) -> Any:
        return json.loads(self.__dict__["post"][rank, self.rank].get(timeout=HANG))


def shared(
    count: int, lines: Sequence[str | Unreadable | None], answer: Any
) -> list[str | Unreadable]:
    from queue import Queue

    post = {(a, b): Queue() for a in range(count) for b in range(count)}  # type: ignore[var-annotated]
    ranks = [Mailbox(rank, count) for rank in range(count)]
    for one in ranks:
        one.__dict__["post"] = post
    helpers = [
        threading.Thread(target=lambda one=one: list(answers([], answer, one)), daemon=True)
        for one in ranks[1:]
    ]
    for helper in helpers:
        helper.start()
    try:
        return list(answers(lines, answer, ranks[0]))
    finally:
        for helper in helpers:
            helper.join(HANG)
            assert not helper.is_alive()


def echo(items: Any) -> Iterator[str]:
    for number, text in items:
        if text == "bad":
            raise ValueError(f"line {number}\nis bad")
        yield f"{number} {text}"


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 2, 5, 300])
def test_order_whatever_the_number_of_lines_and_processes(processes: int, count: int) -> None:
    lines: list[str | None] = [f"text {n}" for n in range(count)]
    want = [f"{n} text {n}" for n in range(count)]
    lines[1:1] = [None, None]
    assert shared(processes, lines, echo) == want


@pytest.mark.parametrize(("low_latency", "sizes"), [(True, [64, 128, 108]), (False, [300])])
def test_where_nobody_waits_windows_are_whole(low_latency: bool, sizes: list[int]) -> None:
    seen = []

    def answer(items: list[tuple[int, str]]) -> Iterator[str]:
        seen.append(len(items))
        yield from (text for _, text in items)

    lines = [f"{n}" for n in range(300)]
    assert list(answers(lines, answer, Processes(), low_latency=low_latency)) == lines
    assert seen == sizes


@pytest.mark.parametrize("processes", [1, 3])
@pytest.mark.parametrize("place", [0, 1, 4])
def test_a_line_without_an_answer_leaves_the_others_theirs(processes: int, place: int) -> None:
    lines: list[str | Unreadable | None] = ["good"] * 5
    lines[place] = "bad"
    lines[2] = Unreadable("as it was read")
    want: list[str | Unreadable] = [f"{n} good" for n in range(5)]
    want[place] = Unreadable(f"line {place} is bad")
    want[2] = Unreadable("as it was read")
    assert shared(processes, lines, echo) == want


def test_a_fault_in_one_process_ends_all() -> None:
    def fail(items: Any) -> Iterator[str]:
        raise KeyError("pears")

    with pytest.raises((ValueError, KeyError), match="pears"):
        shared(2, ["one", "two"], fail)


# Options, in this process


def said(capsys: pytest.CaptureFixture[str], *words: object, status: int = 0) -> str:
    assert main([str(word) for word in words]) == status
    captured = capsys.readouterr()
    if status:
        assert captured.err.startswith("regard: ")
        assert captured.err.count("\n") == 1
    return captured.err if status else captured.out


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "text.gz"
    path.write_bytes(gzip.compress(b"ab cd efg\n\nhij klm"))
    return path


@pytest.mark.parametrize("reason", ["", "there is no C++ compiler"])
def test_8_bits_and_one_line_where_they_are_slow(
    reason: str,
    folder: Path,
    table: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not reason and native.library() is None:
        pytest.skip(native.missing())
    if reason:
        monkeypatch.setattr(native.SOURCE, "kernels", lambda: native.Kernels(None, "", reason))
    assert main(["translate", str(folder), "--files", str(table), "--precision", "int8"]) == 0
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 3
    slow = f"regard: 8-bit layers run through torch, and slower: {reason}\n"
    assert captured.err == (slow if reason else "")


def test_the_forms_of_what_is_written(
    folder: Path, table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = load(folder)
    assert isinstance(model, Translator)
    given = ["--files", table, "--precision", "fp32"]
    texts = ["ab cd efg", "", "hij klm"]
    plain = said(capsys, "translate", folder, *given).splitlines()
    assert plain == model.translate(texts)
    found = model.hypotheses(texts, n_best=3)
    ranked = said(capsys, "translate", folder, *given, "--n-best", 3).splitlines()
    assert ranked == [
        f"{n} ||| {one.text} ||| {one.score:.6g}" for n, best in enumerate(found) for one in best
    ]
    assert [len(best) for best in found] == [3, 1, 3]
    words = [
        "translate",
        folder,
        "--files",
        table,
        "--precision",
        "fp32",
        "--json",
        "--scores",
        "--align",
    ]
    rows = [json.loads(line) for line in said(capsys, *words, "--head", 2, 1, 1).splitlines()]
    assert [row["source"] for row in rows] == texts
    (first,), (empty,), _ = (row["translations"] for row in rows)
    assert empty == {"text": "", "score": 0.0, "log_p": 0.0, "tokens": [], "alignment": []}
    assert first["text"] == plain[0]
    assert first["log_p"] == pytest.approx(sum(token["log_p"] for token in first["tokens"]))
    assert first["score"] == pytest.approx(first["log_p"] / len(first["tokens"]))


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--files", "nope.txt"], "nope.txt cannot be found; name text files"),
        (["--files", "-", "nope.txt"], "- is standard input, which cannot be read among files"),
        (["--device", "cudda"], 'device ("cudda") is not one that torch knows'),
        (["--device", ""], "--device is empty"),
        *(
            (["--device", name], f'device ("{name}") is not supported; choose auto, cpu, cuda')
            for name in ("meta", "xla", "vulkan", "privateuseone")
        ),
        (["--device", "cpu:3"], 'device ("cpu:3") is not there; the last is "cpu"'),
        (["--n-best", "0"], "n_best (0) must be 1 or more"),
        (["--batch", "0"], "batch (0) must be 1 or more"),
        (["--beams", "0"], "beams (0) must be 1 or more"),
        (["--head", "3", "1", "0"], "head (3 1 0): layer must be 1 to 2, head 1 to 2"),
        (["--precision", "fp8"], "--precision"),
    ],
)
def test_wrong_options_get_one_line(
    folder: Path, words: list[str], line: str, capsys: pytest.CaptureFixture[str], tmp_path: Path,
) -> None:  # fmt: skip
    path = tmp_path / "text"
    path.write_text("ab\n")
    files = [] if "--files" in words else ["--files", path]
    assert line in said(capsys, "translate", folder, *files, *words, status=2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = said(capsys, "translate", folder, "--device", "cuda:1", status=2)
    assert 'device ("cuda:1") needs a GPU, and torch finds none; try "cpu"' in line


@pytest.mark.skipif(bool(native.missing()), reason="no compiler")
def test_logits_that_are_not_finite_are_one_line_in_every_precision(
    folder: Path, tmp_path: Path, table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    undefined, quantized = tmp_path / "undefined", tmp_path / "quantized"
    saved: Any = load(folder)
    with torch.no_grad():
        saved.model.encoder.blocks[0].add_attention.norm.weight[3] = torch.nan
    files = {"tokenizer.json": (folder / "tokenizer.json").read_bytes()}
    task = json.loads((folder / "config.json").read_text())["task"]
    checkpoint.save(undefined, saved.model, files=files, task=task)
    assert main(["quantize", str(undefined), str(quantized)]) == 0
    capsys.readouterr()
    lines = set()
    for run, precision, beams in (
        (undefined, "fp32", 1),
        (undefined, "int8", 1),
        (undefined, "int8", 3),
        (quantized, "int8", 1),
    ):
        words = ["translate", run, "--files", table, "--precision", precision, "--beams", beams]
        assert main(list(map(str, words))) == 1
        written, line = capsys.readouterr()
        assert not written.strip()
        lines.add(line.replace(str(run), "RUN"))
    (line,) = lines
    assert "the logits were not finite; look for NaN" in line


def test_a_damaged_folder_or_file_is_one_line(
    folder: Path, table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in folder.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "is damaged: model.safetensors" in said(capsys, "translate", broken, status=2)
    (broken / "config.json").write_text("{")
    assert "config.json" in said(capsys, "translate", broken, status=2)
    table.write_bytes(table.read_bytes()[:-9])
    line = said(capsys, "translate", folder, "--files", table, status=2)
    assert "text.gz is damaged" in line


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_precisions(
    folder: Path, table: Path, precision: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--files", table, "--precision", precision]
    assert said(capsys, "translate", folder, *words).count("\n") == 3


@pytest.mark.parametrize("longest", [5, 2**16])
def test_lines_of_standard_input_of_any_length(
    longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut out of pieces; what is too long is not held, and what follows is found again."""
    texts = ["ab", "", "x" * longest, "x" * (longest + 1), "é" * 5, "y" * (9 * 2**16), "end\r"]
    given = "\n".join(texts).encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
    found = list(Lines(longest=longest))
    assert [isinstance(line, Unreadable) for line in found] == [
        len(text.rstrip("\r")) > longest for text in texts
    ]
    kept = [text.rstrip("\r") for text in texts if len(text.rstrip("\r")) <= longest]
    assert [line for line in found if isinstance(line, str)] == kept


def test_a_file_is_measured_by_the_lines_that_were_answered(tmp_path: Path, table: Path) -> None:
    path = tmp_path / "plain"
    path.write_bytes(b"ab\ncde\n")
    lines = Lines([str(path)])
    assert list(lines) == ["ab", "cde"]
    assert list(lines.marks) == [3, lines.size]
    both = Lines([str(path), str(table)])
    assert len(list(both)) == 5
    assert both.marks[-1] == both.size == 7 + table.stat().st_size


TEXT = b"ab cd\ne\xc3\xa9\nij"
MARK = b"\xef\xbb\xbf"
FORMS = {
    "LF": TEXT,
    "CR": TEXT.replace(b"\n", b"\r"),
    "CR at the end": TEXT.replace(b"\n", b"\r") + b"\r",
    "CR LF": TEXT.replace(b"\n", b"\r\n"),
    "mark": MARK + TEXT,
    "mark and CR": MARK + TEXT.replace(b"\n", b"\r"),
    "gzip": gzip.compress(TEXT),
    "xz": lzma.compress(MARK + TEXT.replace(b"\n", b"\r\n")),
    "bzip2": bz2.compress(TEXT.replace(b"\n", b"\r")),
}


@pytest.mark.parametrize("is_pipe", [False, True])
@pytest.mark.parametrize("kind", FORMS)
def test_standard_input_is_read_as_files_are(
    kind: str, is_pipe: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, path = FORMS[kind], tmp_path / "text"
    path.write_bytes(content)
    assert list(Lines([str(path)])) == ["ab cd", "eé", "ij"]
    with ExitStack() as stack:
        if is_pipe:
            reader, writer = os.pipe()
            os.write(writer, content)
            os.close(writer)
            file = stack.enter_context(os.fdopen(reader))
        else:
            file = stack.enter_context(path.open())
        monkeypatch.setattr(sys, "stdin", file)
        assert [line for line in Lines() if line is not None] == ["ab cd", "eé", "ij"]


def test_lines_of_a_slow_pipe_are_given_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has come is answered before its writer goes on, within a line or between CR and LF."""
    reader, writer = os.pipe()
    with open(reader) as file:
        monkeypatch.setattr(sys, "stdin", file)
        lines = iter(Lines())
        os.write(writer, MARK + b"ab\nc")
        assert [next(lines), next(lines)] == ["ab", None]
        os.write(writer, b"d\r")
        assert next(lines) is None
        os.write(writer, b"\n\nef")
        os.close(writer)
        assert [line for line in lines if line is not None] == ["cd", "", "ef"]


def test_lines_of_a_slow_pipe_may_end_with_cr(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    with open(reader) as file:
        monkeypatch.setattr(sys, "stdin", file)
        lines = iter(Lines())
        os.write(writer, b"ab\rc")
        assert [next(lines), next(lines)] == ["ab", None]
        os.write(writer, b"d\r")
        os.close(writer)
        assert [line for line in lines if line is not None] == ["cd"]


def test_standard_input_that_is_no_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    given = "ab\ncd\n".encode("utf-16")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
    with pytest.raises(ValueError, match="standard input is UTF-16; convert it: iconv -f UTF-16"):
        list(Lines())
