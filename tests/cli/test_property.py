"""Any command with any words, files, streams and signals: it ends as it should, and harms nothing.

A case is drawn from (seed, number), so that one that fails can be repeated alone:

    REGARD_CASE=0:1234 .venv/bin/python -m pytest tests/cli/test_property.py -k one_case
"""

import dataclasses
import hashlib
import json
import os
import random
import re
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from PIL import Image

from regard.cli.evaluate import Evaluate
from regard.cli.look import Look
from regard.cli.predict import Classify, Generate, Label, Read, Translate
from regard.task.specs import spec
from tests.cli.zygote import MEMORY, Ended, Run, Zygote, zygote

SEED = 0
QUICK, ALL = 40, 2100

CODES = {0, 1, 2, 130, 141}
"""Done, done in part, wrong words or data, interrupted, and nobody reads any more."""

SOON = 5.0
"""Seconds of work in which an interrupted command ends."""

Flags = dict[str, list[str]]


# What the user has

WORDS = [
    *("the", "dog", "runs", "on", "a", "beach", "and", "two", "men", "play", "with", "red"),
    *("ball", "near", "old", "house", "Straße", "été"),
]
SMALL = {"--model.width": ["16"], "--model.heads": ["2"], "--model.feed-forward": ["24"]}
STACKS = SMALL | {"--model.encoder-layers": ["1"], "--model.decoder-layers": ["1"]}
STACK = SMALL | {"--model.layers": ["1"]}
STEPS = {"--training.steps": ["2"], "--training.no-tensorboard": []}
TRAINED: dict[str, Flags] = {
    "translate": {
        "--source": ["user/text.en"],
        "--target": ["user/text.de"],
        "--vocabulary": ["300"],
        "--training.batch": ["300"],
        **STACKS,
        **STEPS,
    },
    "dates": {
        "--languages": ["en", "de"],
        "--examples": ["60"],
        "--judged": ["10"],
        "--training.batch": ["300"],
        **STACKS,
        **STEPS,
    },
    "language": {
        "--text": ["user/book.txt"],
        "--vocabulary": ["300"],
        "--context": ["16"],
        "--training.batch": ["200"],
        **STACK,
        **STEPS,
    },
    "label": {
        "--texts": ["user/labels.tsv"],
        "--vocabulary": ["300"],
        "--training.batch": ["200"],
        **STACK,
        **STEPS,
    },
    "encoder": {
        "--text": ["user/book.txt"],
        "--vocabulary": ["300"],
        "--training.batch": ["200"],
        **STACK,
        **STEPS,
    },
    "classify": {
        "--images": ["user/images"],
        "--pixels": ["8"],
        "--patch": ["4"],
        "--training.batch": ["4"],
        **STACK,
        **STEPS,
    },
    "read": {
        "--images": ["user/scans"],
        "--captions": ["user/captions.tsv"],
        "--pixels": ["8", "32"],
        "--patch": ["4"],
        "--training.batch": ["4"],
        **STACKS,
        **STEPS,
    },
}
MARIAN = {
    "--model.norm": ["post"],
    "--model.position": ["sinusoidal-halves"],
    "--model.activation": ["relu"],
    "--words": ["characters"],
}


def make_files(user: Path) -> None:
    rng = random.Random(1)

    def sentence() -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(2, 7)))

    def write(name: str, lines: list[str]) -> None:
        (user / name).write_text("".join(line + "\n" for line in lines), encoding="utf-8")

    user.mkdir()
    english = [sentence() for _ in range(60)]
    write("text.en", english)
    write("text.de", [text.upper() for text in english])
    write("pairs.tsv", [f"{text}\t{text.upper()}" for text in english])
    write("book.txt", [text for _ in range(80) for text in (f"{sentence()}. {sentence()}", "")])
    write("labels.tsv", [f"{rng.choice(['good', 'bad'])}\t{sentence()}" for _ in range(60)])
    write("captions.tsv", [f"{n}.png\t{sentence()}" for n in range(12)])
    write("short.de", [text.upper() for text in english[:40]])
    for name, rows, columns in (("images/x", 8, 8), ("images/y", 8, 8), ("scans", 8, 32)):
        (user / name).mkdir(parents=True)
        for n in range(12):
            pixels = bytes(rng.randrange(256) for _ in range(rows * columns))
            Image.frombytes("L", (columns, rows), pixels).save(user / name / f"{n}.png")
    (user / "latin1.txt").write_bytes("Straße été\n".encode("latin1") * 20)
    (user / "binary").write_bytes(bytes(rng.randrange(256) for _ in range(3000)))
    (user / "empty").write_bytes(b"")
    (user / "nul.txt").write_bytes(b"one\0two\n\xff\xfe\r\nthree\r" * 9)
    (user / "long.txt").write_bytes(b"word " * 30_000 + b"\nshort\n")
    (user / "broken.json").write_text('{"kind": "run", "task": ')
    (user / "own.yaml").write_text("task: dates\nexamples: 60\njudged: 10\ntraining: {steps: 1}\n")
    os.mkfifo(user / "pipe")
    (user / "zero").symlink_to("/dev/zero")
    (user / "nowhere").symlink_to("absent")


PATHS = (
    *("text.en", "text.de", "pairs.tsv", "labels.tsv", "captions.tsv", "images", "scans"),
    *("short.de", "latin1.txt", "binary", "empty", "nul.txt", "long.txt", "broken.json"),
    *("pipe", "zero", "nowhere", "none", "images/x/1.png", "book.txt"),
)

RUNS = (*TRAINED, "marian")


class World:
    """A folder with all that a user has, in which commands run."""

    def __init__(self, folder: Path, commands: Zygote):
        self.folder, self.commands = folder, commands
        make_files(folder / "user")
        (folder / "runs").mkdir()
        for name in RUNS:
            task = "translate" if name == "marian" else name
            flags = TRAINED[task] | (MARIAN if name == "marian" else {})
            self.must(["train", task, f"runs/{name}", *spelled(flags)])
        self.must(["export", "runs/marian", "user/hub", "--to", "marian"])
        self.kept = self.seen()

    def must(self, words: list[str]) -> None:
        ended = self.commands.run(Run(words, after=300.0))
        assert ended.code == 0, ended.err

    def seen(self) -> dict[str, str]:
        """Every file and folder outside the cache, and what is in it."""
        found = {}
        for folder, names, files in os.walk(self.folder):
            place = Path(folder).relative_to(self.folder)
            if place == Path():
                names[:] = [name for name in names if name != "cache"]
                files = [name for name in files if name not in (".stdout", ".stderr", ".stdin")]
            found[f"{place}/"] = ""
            for name in files:
                path = Path(folder) / name
                special = path.is_symlink() or not path.is_file()
                content = b"" if special else path.read_bytes()
                found[f"{place}/{name}"] = hashlib.blake2b(content).hexdigest()
        return found


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("world")
    with zygote(folder) as commands:
        yield World(folder, commands)


# What the user does


@dataclasses.dataclass
class Case:
    """A command with all that it meets."""

    words: list[str]
    stdin: bytes = b""
    outputs: tuple[str, ...] = ()
    """What it may write."""
    copied: tuple[str, str] | None = None
    """A run that it may change, and the copy that it is given."""
    stdout: str = "file"
    encoding: str = "utf-8"
    signal: int = signal.SIGINT
    after: float = 6.0
    answers: bool = False
    """Whether there is a line for each line."""


def spelled(flags: Flags) -> list[str]:
    return [word for flag, values in flags.items() for word in (flag, *values)]


class Draw:
    """The case of a number: what a user might do, and what nobody should."""

    def __init__(self, number: int, seed: int = SEED):
        self.rng = random.Random(f"{seed}:{number}")

    def case(self) -> Case:
        rng = self.rng
        kinds: list[tuple[Callable[[], Case], int]] = [
            *((self.train, 10), (self.again, 4), (self.evaluate, 6), (self.lines, 18)),
            *((self.pictures, 8), (self.attend, 10), (self.cost, 3), (self.lab, 4)),
            *((self.demo, 2), (self.convert, 6), (self.nonsense, 5)),
            *((self.compare, 2), (self.look, 3), (self.check, 1), (self.serve, 2), (self.small, 2)),
        ]
        case = rng.choices([draw for draw, _ in kinds], [weight for _, weight in kinds])[0]()
        if rng.random() < 0.12:
            case.words = self.spoiled(case.words)
        case.encoding = rng.choices(["utf-8", "ascii", "latin1", "cp1252"], [7, 1, 1, 1])[0]
        case.stdout = rng.choices(["file", "full", "gone", "closed"], [20, 1, 1, 1])[0]
        if rng.random() < 0.1:
            case.after = rng.uniform(0.02, 1.5)
            if case.words[:1] == ["train"]:
                case.signal = rng.choice([signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
        return case

    # Values

    def some(self, good: list[str], odd: list[str], share: float = 0.25) -> str:
        return self.rng.choice(odd if self.rng.random() < share else good)

    def whole(self) -> str:
        odd = ["0", "-1", "1e3", "nan", "x", "9" * 30, str(2**63), str(10**12), "1_0", "٣", "1.5"]
        return self.some(["1", "2", "3", "5", "16"], odd)

    def real(self) -> str:
        odd = ["nan", "inf", "-inf", "-1", "1e300", "1e-300", "1e999", "x", "1,5", "9" * 40]
        return self.some(["0.1", "0.5", "1", "0"], odd)

    def path(self) -> str:
        return "user/" + self.rng.choice(PATHS)

    def text(self) -> bytes:
        """Lines as they come: few or none, broken, long, in any script."""
        lines = self.rng.choices(
            [
                *(b"the dog runs", "Straße été".encode(), b"", b"  \t ", "漢字 עברית 😀".encode()),
                *(
                    b"no \xff UTF-8 \xc3",
                    b"nul \0 bell \x07",
                    b"x" * 3000,
                    b"cr\rlf\r",
                    b"</s> |||",
                ),
                "line\u2028separator\x85".encode(),
            ],
            [8, 4, 2, 1, 2, 1, 1, 1, 1, 1, 1],
            k=self.rng.choice([0, 1, 2, 5, 9]),
        )
        if self.rng.random() < 0.03:
            lines.append(b"word " * 20_000)
        return b"\n".join(lines) + self.rng.choice([b"", b"\n"]) * bool(lines)

    def values(self, hint: Any) -> list[str] | None:
        """Words for a flag of this type; None for one that has no value."""
        if get_origin(hint) is Literal:
            return [self.some([str(choice) for choice in get_args(hint)], ["x", "None", "-"], 0.2)]
        if get_origin(hint) is tuple:
            kinds = get_args(hint)
            count = self.rng.choice([0, 1, 2, 3]) if kinds[-1] is ... else len(kinds)
            count += self.rng.random() < 0.1
            items = [self.values(kinds[0]) or [] for _ in range(count)]
            return [word for item in items for word in item]
        if hint is bool:
            return None
        kinds = [kind for kind in get_args(hint) if kind is not NoneType]
        if kinds:
            return self.values(self.rng.choice(kinds))
        if hint is int:
            return [self.whole()]
        return [self.real()] if hint is float else [self.path()]

    def changes(self, kind: Any, most: int, never: tuple[str, ...] = ()) -> Flags:
        """Some of a config's flags, with values of their types, right and wrong."""
        flags = {name: hint for name, hint in flags_of(kind).items() if name not in never}
        chosen: Flags = {}
        for name in self.rng.sample(sorted(flags), self.rng.choice([0, 0, 0, 1, 1, 2, most])):
            values = self.values(flags[name])
            if values is None and self.rng.random() < 0.5:
                name = re.sub(r"([^.]+)$", r"no-\1", name).replace("no---", "--no-")
            chosen[name] = values or []
        return chosen

    def spoiled(self, words: list[str]) -> list[str]:
        """With one thing done to them that fingers, shells and editors do."""
        words = list(words)
        at = self.rng.randrange(len(words) + 1)
        spoil = self.rng.choice(["empty", "twice", "dash", "drop", "--", "more", "long", "swap"])
        match spoil:
            case "drop" | "twice" | "dash" | "swap" if not words:
                pass
            case "empty":
                words.insert(at, "")
            case "twice":
                words += words[-2:]
            case "dash":
                words = [word.replace("--", "\u2014") for word in words]
            case "drop":
                del words[self.rng.randrange(len(words))]
            case "--" | "more":
                words.insert(at, {"--": "--", "more": "--no-such-flag"}[spoil])
            case "long":
                words.append("x" * 100_000)
            case "swap":
                self.rng.shuffle(words)
        return words

    # Commands

    def train(self) -> Case:
        task = self.rng.choice(list(TRAINED))
        changed = self.changes(spec(task).config, 3, ("--cache", "--training.minutes"))
        base = {flag: values for flag, values in TRAINED[task].items() if flag not in changed}
        if "--training.tensorboard" in changed:
            base.pop("--training.no-tensorboard", None)
        run = self.some(["out"], ["user", "user/text.en", "runs", "user/new/deep", "."], 0.1)
        outputs = ("out", "user/new") if run in ("out", "user/new/deep") else ()
        return Case(["train", task, run, *spelled({**base, **changed})], outputs=outputs)

    def again(self) -> Case:
        name = self.rng.choice(RUNS)
        way = self.rng.choice(["--resume", "--again", "--from", "--config"])
        task = spec("translate" if name == "marian" else name)
        flags = spelled(self.changes(task.config, 2, ("--cache", "--training.minutes")))
        if way == "--resume":
            more = [["--training.steps", "3"], [], flags]
            words = ["train", "--resume", "out", *self.rng.choice(more)]
            return Case(words, outputs=("out",), copied=(f"runs/{name}", "out"))
        old = f"runs/{name}"
        if way == "--config":
            odd = ["user/own.yaml", "user/broken.json", "user/zero", "user/pipe", "user", "none"]
            old = self.some([f"runs/{name}/config.json"], [*odd, f"runs/{name}/best/config.json"])
        new = self.some(["out"], [f"runs/{name}", "user"], 0.1)
        more = [[], ["--training.steps", "1"], flags]
        return Case(["train", way, old, new, *self.rng.choice(more)], outputs=("out",))

    def evaluate(self) -> Case:
        run = self.some([f"runs/{name}" for name in RUNS], ["user", "none", "user/images"], 0.1)
        return Case(["evaluate", run, *spelled(self.changes(Evaluate, 3))])

    def lines(self) -> Case:
        command, kind, runs = self.rng.choice(
            [
                ("translate", Translate, ["translate", "dates", "marian"]),
                ("generate", Generate, ["language"]),
                ("label", Label, ["label"]),
            ]
        )
        run = self.some([f"runs/{name}" for name in runs], ["runs/classify", "user", "none"], 0.08)
        flags = self.changes(kind, 3, ("--files", "--precision", "--ensemble"))
        if command == "generate" and "--length" not in flags:
            flags["--length"] = ["3"]
        case = Case([command, run, *spelled(flags)], stdin=self.text())
        if self.rng.random() < 0.2:
            case.words += ["--files", *(self.path() for _ in range(self.rng.choice([1, 1, 2])))]
        else:
            case.answers = "--n-best" not in flags
        return case

    def pictures(self) -> Case:
        command, kind = self.rng.choice([("classify", Classify), ("read", Read)])
        run = self.some([f"runs/{command}"], ["runs/dates", "user", "none"], 0.08)
        good = ["user/images/x/1.png", "user/images/y/2.png", "user/scans/3.png"]
        count = self.rng.choice([0, 1, 1, 2, 4])
        pictures = [self.some(good, [self.path(), "none.png"]) for _ in range(count)]
        return Case([command, run, *pictures, *spelled(self.changes(kind, 2, ("--precision",)))])

    def attend(self) -> Case:
        def entry() -> str:
            return self.some(["1", "2", "-1", "1/2", "0.5", "0"], [self.real(), "1/0"], 0.05)

        def matrix() -> str:
            if self.rng.random() < 0.1:
                return self.rng.choice(["", "x", "1 2; 3", "user/binary", "none.csv", "1;;2", "[["])
            rows, columns = self.rng.choice([1, 2, 3]), self.rng.choices([2, 3], [19, 1])[0]
            return "; ".join(" ".join(entry() for _ in range(columns)) for _ in range(rows))

        words = ["attend", f"--query={matrix()}"]
        if self.rng.random() < 0.5:
            words.append(f"--key={matrix()}")
        if self.rng.random() < 0.3:
            words.append(f"--value={matrix()}")
        if self.rng.random() < 0.3:
            words += ["--beta", self.some(["1", "1/2", "inf", "0"], [self.real()])]
        if self.rng.random() < 0.4:
            masks = ["causal", "window:1", "window:1,0", "prefix:1", "causal & window:2"]
            odd = [f"window:{'9' * 30}", "prefix:-1", "documents:0,1", "nothing", "1 0; 0 1", "&"]
            words += ["--mask", self.some(masks, odd)]
        if self.rng.random() < 0.3:
            words += ["--explain", *self.rng.choice([[], ["A[1,1]"], ["C"], ["A[9,9]"], ["Z"]])]
        if self.rng.random() < 0.2:
            words += ["--digits", self.whole()]
        return Case([*words, *self.rng.choice([[], ["--json"], ["--latex"], ["--markdown"]])])

    def cost(self) -> Case:
        known = ["tiny", "vit-ti/16", "runs/dates", "runs/classify"]
        words = ["cost", self.some(known, ["layers", "x", "vit-z"], 0.2)]
        if self.rng.random() < 0.5:
            sizes = ["length", "batch", "vocabulary", "image", "classes", "width"]
            words += [f"--{self.rng.choice(sizes)}", self.whole()]
        more = [[], ["--json"], ["--markdown"], ["--plot", "plot.svg"], ["--plot", "/dev/full"]]
        return Case([*words, *self.rng.choice(more)], outputs=("plot.svg",))

    def lab(self) -> Case:
        if self.rng.random() < 0.2:
            more = [[], ["exercise", "vit", "out"]]
            return Case(["lab", *self.rng.choice(more)], outputs=("out",))
        names = ["cold-limit", "position-kernel", "equivariance"]
        words = ["lab", self.some(names, ["37", "x", "-1", "9" * 30], 0.3)]
        more = [
            *([], [], ["--json"], ["--report", "lab.html"], ["--plot", "plot.svg"]),
            *(["--report", "user"], ["--report", "/dev/full"]),
        ]
        return Case([*words, *self.rng.choice(more)], outputs=("lab.html", "plot.svg"))

    def demo(self) -> Case:
        words = self.rng.choice([["byhand"], ["dates", "--run", "out"], ["x"], ["--run", "user"]])
        return Case(["demo", *words], outputs=("out",), after=2.0)

    def convert(self) -> Case:
        model, other = (f"runs/{self.rng.choice(RUNS)}" for _ in range(2))
        words = self.rng.choice(
            [
                ["export", model, "out", "--to", self.some(["marian", "vit"], ["x"], 0.1)],
                ["export", "runs/marian", self.some(["out"], ["user"], 0.1), "--to", "marian"],
                ["import", self.some(["user/hub"], [self.path(), model, "none/x"]), "out"],
                ["average", model, other, "out"],
                ["average", model, model, self.some(["out"], ["user", model], 0.2)],
            ]
        )
        return Case(words, outputs=("out",))

    def compare(self) -> Case:
        runs = [self.some(["runs/translate", "runs/marian"], [f"runs/{n}" for n in RUNS], 0.2)]
        runs += self.rng.choice([[], ["runs/translate"], ["runs/marian", "none"]])
        files = ["--source", "user/text.en", "--target", "user/text.de", "--samples", "20"]
        return Case(["compare", *runs, *self.rng.choice([files, files[:4], files[:2], []])])

    def look(self) -> Case:
        run = self.some([f"runs/{name}" for name in RUNS], ["user", "none"], 0.1)
        shown = self.rng.choice(
            [
                *(["--text", "the dog runs"], ["--text", ""], ["--text", "x" * 2000], []),
                *(["--image", "user/images/x/1.png"], ["--image", self.path()]),
            ]
        )
        flags = self.changes(Look, 2, ("--text", "--image", "--out", "--png", "--svg"))
        more = [
            [],
            ["-o", "page.html"],
            ["--svg", "page.html"],
            ["-o", "user"],
            ["-o", "/dev/full"],
        ]
        words = ["look", run, *shown, *spelled(flags), *self.rng.choice(more)]
        return Case(words, outputs=("page.html",))

    def check(self) -> Case:
        run = self.some([f"runs/{name}" for name in RUNS], ["user", "none"], 0.2)
        more = [[], ["--json"], ["--data", self.path()], ["--data", "user/text.en"]]
        return Case(["check", run, *self.rng.choice(more)], after=3.0)

    def serve(self) -> Case:
        """A server that is asked nothing ends when it is told to."""
        run = self.some([f"runs/{name}" for name in RUNS], ["user", "none"], 0.2)
        words = self.rng.choice([["serve", run, "--port", "0"], ["studio", run, "--no-browser"]])
        if words[0] == "studio":
            words += ["--port", self.some(["0"], [self.whole()])]
        elif self.rng.random() < 0.3:
            odd = [["--host", "x.invalid"], ["--keys", "none"], ["--port", "1"], ["--workers", "0"]]
            words += self.rng.choice(odd)
        case = Case(words, after=self.rng.uniform(0.05, 0.3))  # it works little: this is late
        case.signal = self.rng.choice([signal.SIGINT, signal.SIGTERM])
        return case

    def small(self) -> Case:
        run = f"runs/{self.rng.choice(RUNS)}"
        words = self.rng.choice(
            [
                *(["doctor"], ["doctor", "--json"], ["recipes"], ["recipes", "dates"]),
                *(["recipes", "x"], ["quantize", run, "out"], ["quantize", "user", "out"]),
                *(["quantize", run, "user"], ["train", "--recipe", "multi30k-en-de", "out"]),
            ]
        )
        return Case(words, outputs=("out",))

    def nonsense(self) -> Case:
        words = ["--help", "--version", "--debugg", "trian", "train", "lab", "-h", "translate", "x"]
        return Case(self.rng.sample(words, self.rng.choice([0, 1, 1, 2])))


def flags_of(kind: Any, prefix: str = "--") -> dict[str, Any]:
    """Every flag of a dataclass, and the type of its value."""
    found: dict[str, Any] = {}
    for name, hint in get_type_hints(kind).items():
        flag = prefix + name.replace("_", "-")
        nested = dataclasses.is_dataclass(hint)
        found.update(flags_of(hint, f"{flag}.") if nested else {flag: hint})
    return found


# What must be true


def perform(world: World, case: Case) -> Ended:
    (world.folder / ".stdin").write_bytes(case.stdin)
    if case.copied is not None:
        shutil.copytree(world.folder / case.copied[0], world.folder / case.copied[1])
    given = ".stdin" if case.stdin else "/dev/null"
    run = Run(case.words, given, case.stdout, case.encoding, int(case.signal), case.after)
    return world.commands.run(run)


def faults(world: World, case: Case, ended: Ended) -> list[str]:
    """All that is wrong with how a command ended."""
    found = []
    lines = ended.err.splitlines()
    told = [line for line in lines if re.match(r"regard:(?! engine:| precision:)", line)]
    ends = [line for line in told if not re.match(r"regard: (left out:|[\d,]+ × )", line)]
    # A signal ends a process, which a shell tells as 128 and its number, or is caught.
    number = int(case.signal)
    allowed = CODES | ({-number, 128 + number} if ended.signalled else set())
    if ended.code not in allowed:
        found.append(f"exit code {ended.code}")
    if ended.code == 2 and (len(ends) != 1 or lines[-1] != ends[0]):
        found.append(f"{len(ends)} lines instead of one")
    if ended.code == 1 and not told:
        found.append("exit code 1 without a word")
    if "Traceback (most recent call last)" in ended.err + ended.out:
        found.append("a traceback")
    if ended.killed or ended.after > SOON:
        found.append(f"goes on for {ended.after:.1f} s after a signal")
    if ended.memory > MEMORY // 2:
        found.append(f"takes {ended.memory / 2**30:.1f} GiB")
    if case.answers and case.stdout == "file" and ended.code in (0, 1):
        # Without any LF, lines end with CR.
        given = case.stdin if b"\n" in case.stdin else case.stdin.replace(b"\r", b"\n")
        wanted = given.count(b"\n") + (not given.endswith(b"\n") and bool(given))
        if ended.out.count("\n") != wanted:
            found.append(f"{ended.out.count(chr(10))} lines for {wanted}")
    if "--json" in case.words and case.stdout == "file" and ended.code == 0:
        found += _json_faults(case, ended.out)
    return found + _files(world, case)


def _json_faults(case: Case, out: str) -> list[str]:
    each = case.words[0] in ("translate", "classify", "read", "label", "generate", "score")
    for text in out.split("\n")[:-1] if each else [out]:
        try:
            json.loads(text)
        except ValueError:
            return [f"no JSON: {text[:80]!r}"]
    return []


def _files(world: World, case: Case) -> list[str]:
    """What was made or changed that should not have been; all that was made is cleared away."""
    for name in case.outputs:
        _remove(world.folder / name)
    seen = world.seen()
    made = sorted(seen.keys() - world.kept.keys())
    gone = sorted(world.kept.keys() - seen.keys())
    changed = sorted(name for name in seen.keys() & world.kept if seen[name] != world.kept[name])
    for name in made:
        _remove(world.folder / name)
    world.kept = world.seen()  # what is lost is not reported again
    lists = {"made": made, "removed": gone, "changed": changed}
    return [f"{what} {', '.join(names[:5])}" for what, names in lists.items() if names]


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


COUNTS: Counter[tuple[str, int]] = Counter()
"""How many commands ended with which code."""


def check(world: World, number: int, seed: int = SEED) -> None:
    case = Draw(number, seed).case()
    ended = perform(world, case)
    COUNTS["".join(case.words[:1])[:12], ended.code] += 1
    wrong = faults(world, case, ended)
    assert not wrong, (
        f"{'; '.join(wrong)}\nREGARD_CASE={seed}:{number}\n{case}\n{ended.err[-2000:]}"
    )


@pytest.mark.parametrize("first", range(0, QUICK, 10))
def test_a_few_cases(world: World, first: int) -> None:
    for number in range(first, first + 10):
        check(world, number)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(QUICK, ALL, 50))
def test_many_cases(world: World, first: int) -> None:
    for number in range(first, first + 50):
        check(world, number)


@pytest.mark.skipif("REGARD_CASE" not in os.environ, reason="REGARD_CASE names no case")
def test_one_case(world: World) -> None:
    seed, number = map(int, os.environ["REGARD_CASE"].split(":"))
    check(world, number, seed)


def test_a_case_is_drawn_from_its_number_alone() -> None:
    assert Draw(7).case() == Draw(7).case()
    assert len({str(Draw(number).case()) for number in range(50)}) > 45
