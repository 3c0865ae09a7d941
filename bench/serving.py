"""Many clients at once: `regard serve` beside a server that answers one request at a time, in the
same precision and in float32, as `load(RUN)` gives a model to whoever writes a server; and beside
CTranslate2 with dynamic batching, all behind the same HTTP layer.

    python -m bench.serving RUN --source test.en --clients 500 --seconds 60
    python -m bench.serving RUN --source test.en --device cuda --sentences 1 32

Clients are processes of their own, on loopback; each asks for one sentence, or --sentences at a
time, compares the answers with the direct ones, and asks for the next. They share the machine's
cores with the server: their share is told. On a GPU, where bfloat16 rounds other batches in other
ways, an answer is wrong if it has less than half of the direct one's words, and the bare engine,
which translates all sentences in one call, takes CTranslate2's place. Servers take turns in rounds,
so that a busy machine is as busy for all of them. On one that others share, whoever has more
threads has more of it: there the CPU time of a server for each request says more than requests a
second.
"""

import argparse
import asyncio
import gzip
import json
import multiprocessing
import os
import random
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

PROCESSES = 4
"""Of clients."""


# Clients


@dataclass
class Round:
    """What clients of one process have seen."""

    seconds: list[float] = field(default_factory=list)
    refused: int = 0
    wrong: int = 0
    errors: list[str] = field(default_factory=list)
    cpu: float = 0.0


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

    begun = time.process_time()
    asyncio.run(run())
    seen.cpu = time.process_time() - begun
    return seen


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

    from regard import load

    search = load(run).search  # type: ignore[union-attr]
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

    def cpu(self) -> float:
        ticks = 0
        for pid in self.pids():
            words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(words[11]) + int(words[12])
        return ticks / os.sysconf("SC_CLK_TCK")

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
    server_cpu: float = 0.0
    idle: int = 0
    peak: int = 0

    def add(self, rounds: Sequence[Round], took: float) -> None:
        for one in rounds:
            self.seconds += one.seconds
            self.refused += one.refused
            self.wrong += one.wrong
            self.errors += one.errors
            self.client_cpu += one.cpu
        self.time += took

    @property
    def rate(self) -> float:
        return len(self.seconds) / self.time

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
        list(pool.map(time.sleep, [0.1] * PROCESSES))  # all are there
        cpu, begun = server.cpu(), time.monotonic()
        asked = [pool.submit(clients, server.port, traffic, share, seconds) for share in shares]
        while not all(future.done() for future in asked):
            time.sleep(0.5)
            total.peak = max(total.peak, server.memory())
        total.server_cpu += server.cpu() - cpu
        total.add([future.result() for future in asked], time.monotonic() - begun)


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
    parser.add_argument("--rounds", type=int, default=3, help="in which servers take turns")
    parser.add_argument("--precision", choices=["int8", "fp32", "bf16"])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="of every model")
    parser.add_argument("--sentences", type=int, nargs="+", default=[1], help="of a request")
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("--exported", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.precision = options.precision or {"cpu": "int8", "cuda": "bf16"}[options.device]
    if options.role:
        given = (options.run, options.exported, options.precision)
        serve(options.role, *given, options.threads, options.device)
        return
    with tempfile.TemporaryDirectory() as folder:
        for sentences in options.sentences:
            _measured(options, Path(folder) / "exported", sentences)


def _measured(options: argparse.Namespace, exported: Path, sentences: int) -> None:
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
    kinds = {"regard serve": (ours, known), "one at a time": ([*own, "one"], known)}
    if options.device == "cpu":
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
        for error in statistics.multimode(total.errors)[:3]:
            print(f"  {error}")
    rate = totals["regard serve"].rate
    cost = {name: total.server_cpu / len(total.seconds) for name, total in totals.items()}
    for name in list(totals)[1:]:
        print(
            f"regard serve beside {name}: {rate / totals[name].rate:.2f} × as many requests a "
            f"second, {cost[name] / cost['regard serve']:.2f} × as many in a second of CPU time"
        )
    if options.device == "cuda":
        bare = _bare(texts)
        share = rate * sentences / bare
        print(f"the bare engine: {bare:,.0f} sentences/s, of which regard serve has {share:.2f}")


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
