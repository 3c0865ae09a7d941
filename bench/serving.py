"""Many clients at once: `regard serve` beside a server that answers one request at a time, in the
same precision and in float32, as `load(RUN)` gives a model to whoever writes a server; and beside
CTranslate2 with dynamic batching, all behind the same HTTP layer.

    python -m bench.serving RUN --source test.en --clients 500 --seconds 60
    python -m bench.serving RUN --source test.en --device cuda --sentences 1 32 --warm-up 10
    … --alone --serve-flags "--workers 1" --serve-flags "--workers 3 --http-processes 4"

Clients are processes of their own, on loopback; each asks for one sentence, or --sentences at a
time, compares the answers with the direct ones, and asks for the next. They share the machine's
cores with the server: their share is told, and how busy the busiest process of each kind is, which
at 1 core is the limit. On a GPU, where bfloat16 rounds other batches in other ways, an answer is
wrong if it has less than half of the direct one's words, and the bare engine, which translates all
sentences in one call, takes CTranslate2's place. Servers take turns in rounds, so that a busy
machine is as busy for all of them. On one that others share, whoever has more threads has more of
it: there the CPU time of a server for each request says more than requests a second.
"""

import argparse
import asyncio
import gzip
import json
import multiprocessing
import os
import random
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROCESSES = max(4, (os.cpu_count() or 1) // 4)
"""Of clients: each asks a few thousand times a second, and a server needs the other cores."""


# Clients


@dataclass
class Round:
    """What clients of one process have seen."""

    seconds: list[float] = field(default_factory=list)
    refused: int = 0
    wrong: int = 0
    errors: list[str] = field(default_factory=list)
    took: float = 0.0
    cpu: float = 0.0
    """Seconds of CPU time."""


@dataclass(frozen=True)
class Traffic:
    """What clients ask for, and how many sentences at a time."""

    texts: Sequence[tuple[str, str | None]]
    """Each with the direct translation, or None where any will do."""
    sentences: int = 1
    exact: bool = True
    """Whether only the direct translation is right, or one that is much like it too."""

    def wrong(self, found: str, want: str | None) -> bool:
        if want is None or found == want:
            return False
        ours, theirs = set(found.split()), set(want.split())
        return self.exact or 2 * len(ours & theirs) < max(len(ours), len(theirs))


async def client(port: int, traffic: Traffic, end: float, seen: Round) -> None:
    reader = writer = None
    chance = random.Random()
    while time.monotonic() < end:
        if writer is None:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        asked = chance.choices(traffic.texts, k=traffic.sentences)
        body = json.dumps({"text": [text for text, _ in asked], "model": "m"}).encode()
        begun = time.monotonic()
        writer.write(
            b"POST /v1/translate HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        try:
            assert reader is not None
            head = await reader.readuntil(b"\r\n\r\n")
            fields = dict(
                line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line
            )
            content = await reader.readexactly(int(fields[b"content-length"]))
        except (OSError, asyncio.IncompleteReadError) as error:
            seen.errors.append(type(error).__name__)
            writer = None
            continue
        status = int(head[9:12])
        if status == 429:
            seen.refused += 1
            await asyncio.sleep(min(1.0, float(fields[b"retry-after"])))
            continue
        if status != 200:
            seen.errors.append(f"{status} {content[:80]!r}")
            continue
        found = json.loads(content)["translations"]
        for one, (_, want) in zip(found, asked, strict=True):
            seen.wrong += traffic.wrong(one["text"], want)
        seen.seconds.append(time.monotonic() - begun)
    if writer is not None:
        writer.close()


def clients(port: int, traffic: Traffic, count: int, seconds: float) -> Round:
    """Of one process."""
    seen = Round()

    async def run() -> None:
        end = time.monotonic() + seconds
        await asyncio.gather(*(client(port, traffic, end, seen) for _ in range(count)))

    from regard.serve.server import loop

    begun, used = time.monotonic(), time.process_time()
    with asyncio.Runner(loop_factory=loop()) as runner:
        runner.run(run())
    seen.took, seen.cpu = time.monotonic() - begun, time.process_time() - used
    return seen


def imported(_: int) -> None:
    """A process of clients that has imported what it needs, and leaves the next one to another."""
    import regard.serve.server  # noqa: F401

    time.sleep(0.5)


# Servers


class Alone:
    """One request at a time, as a plain server would: `load(RUN).translate([text])`."""

    ready, restarts = True, 0

    def __init__(self, translate: Callable[[list[str]], list[str]], pool: Executor):
        self.translate, self.pool = translate, pool

    async def ask(self, request: Any, stream: Any = None) -> Any:
        loop = asyncio.get_running_loop()
        texts = await loop.run_in_executor(self.pool, self.translate, list(request.texts))
        return [{"text": text, "score": 0.0, "alternatives": []} for text in texts]

    def models(self) -> list[dict[str, Any]]:
        return []

    async def reload(self, name: str) -> None: ...

    def stats(self) -> list[dict[str, int]]:
        return []


class Together(Alone):
    """Whatever waits is one call, which the library sorts into batches: dynamic batching."""

    def __init__(self, translate: Callable[[list[str]], list[str]], pool: Executor):
        super().__init__(translate, pool)
        self.waiting: list[tuple[list[str], asyncio.Future[list[str]]]] = []
        self.running = False

    async def ask(self, request: Any, stream: Any = None) -> Any:
        future: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        self.waiting.append((list(request.texts), future))
        if not self.running:
            self.running = True
            self.task = asyncio.ensure_future(self._run())
        return [{"text": text, "score": 0.0, "alternatives": []} for text in await future]

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while self.waiting:
            batch, self.waiting = self.waiting, []
            texts = [text for some, _ in batch for text in some]
            found = iter(await loop.run_in_executor(self.pool, self.translate, texts))
            for some, future in batch:
                texts = [next(found) for _ in some]
                if not future.done():
                    future.set_result(texts)
        self.running = False


_direct: Any = None


def _load(run: str, precision: str, threads: int, device: str) -> None:
    global _direct
    import torch

    from regard import load

    torch.set_num_threads(threads)
    _direct = load(run)
    if precision == "int8":
        from regard.decode.engine.int8.linear import int8

        int8(_direct.model)
    _direct.model.to(device, torch.bfloat16 if precision == "bf16" else None)


def _translate(texts: list[str]) -> list[str]:
    return list(_direct.translate(texts))


def ctranslate2_translator(
    run: str, folder: str, precision: str, threads: int
) -> Callable[..., list[str]]:
    """The exported model in CTranslate2, with the model's own tokenizer and search."""
    import ctranslate2
    import tokenizers

    from regard import Translator

    search = Translator.load(run).search
    kind = {"int8": "int8", "fp32": "float32"}[precision]
    theirs = ctranslate2.Translator(folder, "cpu", compute_type=kind, intra_threads=threads)
    tokenizer = tokenizers.Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    banned = [[tokenizer.id_to_token(token)] for token in search.banned]

    def translate(texts: list[str], beams: int = search.beams, batch: int = 64) -> list[str]:
        sources = [one.tokens for one in tokenizer.encode_batch(texts, add_special_tokens=False)]
        found = theirs.translate_batch(
            sources,
            beam_size=beams,
            length_penalty=search.length_penalty,
            max_decoding_length=search.length,
            suppress_sequences=banned,
            max_batch_size=batch,
        )
        best = [[tokenizer.token_to_id(token) for token in one.hypotheses[0]] for one in found]
        return list(tokenizer.decode_batch(best))

    return translate


def serve(kind: str, run: str, exported: str, precision: str, threads: int, device: str) -> None:
    """A server of one of the other kinds, in a process of its own."""
    import uvicorn

    from regard.serve.app import Options, create
    from regard.serve.server import bound
    from regard.service.requests import Limits

    backend: Any
    if kind == "one":
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(1, context, _load, (run, precision, threads, device))
        pool.submit(_translate, ["a"]).result()
        backend = Alone(_translate, pool)
    else:
        translate = ctranslate2_translator(run, exported, precision, threads)
        translate(["a"])
        backend = Together(translate, ThreadPoolExecutor(1))
    listening = bound("127.0.0.1", 0)
    app = create(backend, Options(limits=Limits(seconds=300.0)))
    print(f"http://127.0.0.1:{listening.getsockname()[1]}/docs", file=sys.stderr, flush=True)
    config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", ws="none")
    uvicorn.Server(config).run(sockets=[listening])


class Server:
    """A server's process, and those that it starts."""

    def __init__(self, words: list[str]):
        self.process = subprocess.Popen(
            [sys.executable, *words], stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        self.port = 0
        assert self.process.stderr is not None
        said = []
        for line in self.process.stderr:
            said.append(line)
            if "/docs" in line:
                self.port = int(line.rpartition(":")[2].partition("/")[0])
                break
        assert self.port, "".join(said)

    def pids(self) -> list[int]:
        found, waiting = [], [self.process.pid]
        while waiting:
            pid = waiting.pop()
            found.append(pid)
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                waiting += map(int, children.read_text().split())
        return found

    def memory(self) -> int:
        """Bytes that all of them have of their own; what they share is counted once."""
        total = 0
        for pid in self.pids():
            try:
                text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            except OSError:
                continue
            total += sum(
                int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")
            )
        return 1024 * total

    def cpu(self) -> dict[tuple[str, int], float]:
        """Seconds of CPU time of each process, by its kind and id."""
        seconds = {}
        for pid in self.pids():
            words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            front = b"regard.serve.front" in Path(f"/proc/{pid}/cmdline").read_bytes()
            kind = "HTTP" if front or pid == self.process.pid else "workers"
            ticks = int(words[11]) + int(words[12])
            seconds[kind, pid] = ticks / os.sysconf("SC_CLK_TCK")
        return seconds

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
        # The processes of an executor outlive a server that ends by a signal.
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        assert self.process.stderr is not None
        self.process.stderr.close()


@dataclass
class Total:
    seconds: list[float] = field(default_factory=list)
    refused: int = 0
    wrong: int = 0
    errors: list[str] = field(default_factory=list)
    time: float = 0.0
    client_cpu: float = 0.0
    busiest_client: float = 0.0
    cpu: dict[tuple[str, int], float] = field(default_factory=dict)
    """Of each process of the server, by its kind and number."""
    idle: int = 0
    peak: int = 0

    def add(self, rounds: Sequence[Round]) -> None:
        for one in rounds:
            self.seconds += one.seconds
            self.refused += one.refused
            self.wrong += one.wrong
            self.errors += one.errors
            self.client_cpu += one.cpu
        self.busiest_client += max(one.cpu for one in rounds)
        self.time += max(one.took for one in rounds)

    def add_cpu(self, used: dict[tuple[str, int], float]) -> None:
        """Of the processes of one round, the busiest of each kind first."""
        for kind in {kind for kind, _ in used}:
            ranked = sorted((one for (name, _), one in used.items() if name == kind), reverse=True)
            for n, seconds in enumerate(ranked):
                self.cpu[kind, n] = self.cpu.get((kind, n), 0.0) + seconds

    @property
    def server_cpu(self) -> float:
        return sum(self.cpu.values())

    @property
    def rate(self) -> float:
        return len(self.seconds) / self.time

    def cores(self) -> str:
        """Of each kind of process, all together and the busiest."""
        told = []
        for kind in sorted({kind for kind, _ in self.cpu}):
            used = [seconds for (name, _), seconds in self.cpu.items() if name == kind]
            told.append((kind, len(used), sum(used), max(used)))
        told.append(("clients", PROCESSES, self.client_cpu, self.busiest_client))
        return "; ".join(
            f"{kind} ({count}) {used / self.time:.2f} cores, the busiest {most / self.time:.2f}"
            for kind, count, used, most in told
        )

    def line(self, name: str) -> str:
        ranked = sorted(self.seconds)
        p50, p99 = (ranked[min(len(ranked) - 1, int(q * len(ranked)))] for q in (0.5, 0.99))
        used = self.server_cpu + self.client_cpu
        each = 1000 * self.server_cpu / max(1, len(self.seconds))
        return (
            f"{name:22s} {self.rate:8.1f}/s  p50 {p50:6.2f} s  p99 {p99:6.2f} s  "
            f"429: {self.refused}  errors: {len(self.errors)}  wrong: {self.wrong}  "
            f"+{(self.peak - self.idle) / 2**20:.0f} MiB  "
            f"cores {used / self.time:.2f}, of which clients {self.client_cpu / used:.0%}  "
            f"server {each:.2f} ms of CPU time for each"
        )


def measure(
    server: Server,
    traffic: Traffic,
    count: int,
    seconds: float,
    total: Total,
) -> None:
    shares = [count // PROCESSES + (n < count % PROCESSES) for n in range(PROCESSES)]
    total.idle = total.idle or server.memory()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(PROCESSES, context) as pool:
        list(pool.map(imported, range(PROCESSES)))  # all are there
        cpu = server.cpu()
        asked = [pool.submit(clients, server.port, traffic, share, seconds) for share in shares]
        while not all(future.done() for future in asked):
            time.sleep(0.5)
            total.peak = max(total.peak, server.memory())
        used = {one: seconds - cpu.get(one, 0.0) for one, seconds in server.cpu().items()}
        total.add_cpu(used)
        total.add([future.result() for future in asked])


def read(path: str) -> list[str]:
    opened = gzip.open if path.endswith(".gz") else open
    with opened(path, "rt", encoding="utf-8") as file:
        return [line.rstrip("\n") for line in file if line.strip()]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.serving", description=__doc__)
    parser.add_argument("run")
    parser.add_argument("--source", required=True, help="sentences, one in each line")
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument(
        "--warm-up",
        type=float,
        default=0.0,
        help="seconds of the same traffic before, in which a GPU's graphs are captured",
    )
    parser.add_argument("--rounds", type=int, default=3, help="in which servers take turns")
    parser.add_argument("--precision", choices=["int8", "fp32", "bf16"])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="of every model")
    parser.add_argument("--sentences", type=int, nargs="+", default=[1], help="of a request")
    parser.add_argument(
        "--serve-flags",
        action="append",
        help='of `regard serve`, in one word: "--workers 2"; once for each server to be measured',
    )
    parser.add_argument("--alone", action="store_true", help="measure `regard serve` alone")
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("--exported", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.precision = options.precision or {"cpu": "int8", "cuda": "bf16"}[options.device]
    if options.role:
        given = (options.run, options.exported, options.precision)
        serve(options.role, *given, options.threads, options.device)
        return
    with tempfile.TemporaryDirectory() as folder:
        told = [
            line
            for sentences in options.sentences
            for line in _measured(options, Path(folder) / "exported", sentences)
        ]
    print("", *told, sep="\n")


def _measured(options: argparse.Namespace, exported: Path, sentences: int) -> list[str]:
    """Measures all servers; on a GPU, what share of the bare engine ours have."""
    from regard.service.requests import LIMITS

    texts = read(options.source)
    _load(options.run, options.precision, 2, options.device)
    want = _translate(texts)
    same = ["--precision", options.precision, "--threads", str(options.threads)]
    same += ["--device", options.device]
    own = ["-m", "bench.serving", options.run, "--source", options.source, *same]
    own += ["--exported", str(exported), "--role"]
    ours = ["-m", "regard", "serve", f"m={options.run}", "--port", "0", *same]
    ours += ["--log", "error", "--seconds", "300"]
    known = Traffic(list(zip(texts, want)), sentences, exact=options.device == "cpu")
    kinds = {
        f"regard serve {flags}".strip(): ([*ours, *shlex.split(flags)], known)
        for flags in options.serve_flags or [""]
    }
    servers = list(kinds)
    if not options.alone:
        kinds["one at a time"] = ([*own, "one"], known)
    if options.device == "cpu" and not options.alone:
        _export(options, exported)
        theirs = ctranslate2_translator(options.run, str(exported), options.precision, 2)(texts)
        agree = sum(map(str.__eq__, theirs, want)) / len(want)
        print(f"{len(texts):,} sentences, of which CTranslate2 translates {agree:.1%} alike")
        any_will_do = Traffic([(text, None) for text in texts], sentences)
        if options.precision != "fp32":
            plain = [*own[:-1], "--precision", "fp32", "--role", "one"]
            kinds["one at a time, float32"] = (plain, any_will_do)
        kinds["CTranslate2, batched"] = ([*own, "ctranslate2"], any_will_do)
    totals = {name: Total() for name in kinds}
    count = min(options.clients, LIMITS.queue // sentences)  # beyond, a server refuses
    for n in range(options.rounds):
        for name, (words, traffic) in kinds.items():
            server = Server(words)
            totals[name].idle = 0
            if options.warm_up:
                measure(server, traffic, count, options.warm_up, Total())
            seconds = options.seconds / options.rounds
            measure(server, traffic, count, seconds, totals[name])
            server.stop()
            print(f"round {n + 1}: {totals[name].line(name)}", flush=True)
    load = os.getloadavg()[1]
    print(f"\n{count} clients, {sentences} sentences a request, {options.seconds:g} s "
          f"each, {options.precision}, load of the machine {load:.1f} on {os.cpu_count()} "
          "cores")  # fmt: skip
    for name, total in totals.items():
        print(total.line(name))
        print(f"  {total.cores()}")
        for error in statistics.multimode(total.errors)[:3]:
            print(f"  {error}")
    cost = {name: total.server_cpu / len(total.seconds) for name, total in totals.items()}
    peers = [name for name in kinds if name not in servers]
    for one in servers:
        for name in peers:
            print(
                f"{one} beside {name}: {totals[one].rate / totals[name].rate:.2f} × as many "
                f"requests a second, {cost[name] / cost[one]:.2f} × as many in a second of CPU time"
            )
    if options.device == "cpu":
        return []
    bare = _bare(texts)
    return [
        f"{one}, {sentences} sentences a request: {totals[one].rate * sentences:,.0f} sentences/s, "
        f"{totals[one].rate * sentences / bare:.2f} of the bare engine's {bare:,.0f}"
        for one in servers
    ]


def _export(options: argparse.Namespace, exported: Path) -> None:
    if exported.exists():
        return
    subprocess.run(
        [sys.executable, "-m", "regard", "export", options.run, exported, "--to", "ctranslate2",
         "--precision", options.precision],
        check=True,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip


def _bare(texts: list[str], rounds: int = 5) -> float:
    """Sentences a second that the engine translates with nothing around it, in one call."""
    took = []
    for _ in range(rounds):
        begun = time.perf_counter()
        _translate(texts)
        took.append(time.perf_counter() - begun)
    return len(texts) / statistics.median(took)


if __name__ == "__main__":
    main()
