"""Our search beside the peers': the same weights, sentences and lengths, greedily and by beams.

    a trained model  --model RUN --source FILE --target FILE: the lines of a real test set, from
                     text to text, and BLEU beside the speed, against CTranslate2 and Hugging Face's
                     generate where they can compute the model.
    random weights   the base Transformer (6 + 6 layers, width 512, 16,000 tokens), 20 tokens in and
                     exactly 30 out, on a CPU against generate and CTranslate2, on CUDA against
                     generate. The encoder counts. The tokens of all systems are compared.
    other models     --model read or generate: the same decoder reading images of 32 × 256 pixels,
                     and a language model of 6 layers, beside their own modules run eagerly.
    a busy machine   --busy: random weights, with and without processes that never rest on half of
                     the cores, of the lowest priority (nice -n 19). They are like programs in
                     another terminal: for Linux a priority counts among programs of one session,
                     and sessions have equal shares.

Each peer runs with each of its settings (`SETTINGS`), and the table at the end has the fastest that
finds the tokens of its default ones. Speeds are tokens found per second, best hypotheses alone.
Ratios are computed from the speeds as shown: above 1, ours is faster. All take turns in one run,
each in a process of its own on a CPU, and each keeps its median.
"""

import argparse
import contextlib
import copy
import itertools
import math
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.nn.utils.rnn import pad_sequence

from bench.table import cell, markdown, ratio
from regard import Translator, checkpoint
from regard.cli.main import share_cores
from regard.decode.engine.eager import EagerEngine
from regard.decode.engine.int8.linear import int8
from regard.decode.engine.pick import Model, pick
from regard.decode.search.beam import beam, power
from regard.decode.search.greedy import greedy
from regard.interop import write
from regard.model.language import LanguageConfig, LanguageModel
from regard.model.transformer import ImageSource, Transformer, TransformerConfig

VOCABULARY, SOURCE, TARGET = 16_000, 20, 30
IMAGE = (32, 256)
START, END = 0, 1
TASK = {"start": START, "end": END, "pad": START}
SPIN = 0.3
"""Seconds for which the threads of the previous system may still spin, as Intel OpenMP's do."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CTRANSLATE2_TYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "int8": "int8"}
SETTINGS = {
    "HF": "generate, dynamic cache",
    "HF static": "generate, static cache, compiled with CUDA graphs",
    "CTranslate2": "one batch, all threads",
    "CTranslate2 workers": "a worker for each thread, the batch shared out",
    "eager": "our own modules, run eagerly",
}
"""Of the peers: each is a system of its own, and a table takes the fastest of a library."""
SAME = 0.9
"""The share of tokens that other settings must leave as they are, to be in a table. With random
weights, rounding in half precision decides some near ties."""

Rows = list[list[int]]
Search = Callable[[torch.Tensor, int], Rows]
"""From ids (B, S) and the beam size to the tokens of the best hypotheses."""


# Systems


def ours(model: Model, precision: str, device: str, eager: bool = False) -> Search:
    made = copy.deepcopy(model)
    made = int8(made) if precision == "int8" else made.to(device, DTYPES[precision])
    weight = next(made.parameters())

    def search(source: torch.Tensor, beams: int) -> Rows:
        prompts = [[START]] * len(source)
        limits: dict[str, Any] = {"end": END, "max_length": TARGET, "min_length": TARGET}
        read: Any = source.to(weight.dtype) if source.is_floating_point() else source
        hints: dict[str, Any] = {"rows": len(source), "beams": beams, "length": TARGET + 1}
        engine = EagerEngine() if eager else pick(made)
        read = None if isinstance(made, LanguageModel) else read
        with engine.open(made, read, None, **hints) as session:
            if beams == 1:
                return [hypothesis.tokens for hypothesis in greedy(session, prompts, **limits)]
            best = beam(session, prompts, width=beams, penalty=power(1.0), **limits)
            return [hypotheses[0].tokens for hypotheses in best]

    return search


def hugging_face(folder: Path, precision: str, device: str, static: bool = False) -> Search:
    """Their generate. A static cache is compiled with CUDA graphs, once for each shape."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    load = transformers.MarianMTModel.from_pretrained
    model = load(folder, dtype=DTYPES[precision]).to(device).eval()
    model.generation_config.forced_eos_token_id = None
    settings: dict[str, Any] = {}
    if static:
        torch._dynamo.config.recompile_limit = 64
        settings["cache_implementation"] = "static"
        settings["compile_config"] = transformers.CompileConfig(dynamic=False)
        model.get_encoder().compile(dynamic=False)

    def search(source: torch.Tensor, beams: int) -> Rows:
        with torch.inference_mode():
            out = model.generate(
                source,
                attention_mask=torch.ones_like(source),
                num_beams=beams,
                do_sample=False,
                min_new_tokens=TARGET,
                max_new_tokens=TARGET,
                **settings,
            )
        return out[:, 1:].tolist()

    return search


def ctranslate2_folder(folder: Path, precision: str) -> Path:
    """Their own folder, from a Marian one, with numbers for words."""
    import transformers
    from ctranslate2.converters.transformers import BartLoader

    model = transformers.MarianMTModel.from_pretrained(folder)
    model.config.normalize_before = model.config.normalize_embedding = False
    spec = BartLoader().get_model_spec(model)
    words = [str(n) for n in range(model.config.vocab_size)]
    spec.register_source_vocabulary(words)
    spec.register_target_vocabulary(words)
    spec.config.decoder_start_token = words[model.config.decoder_start_token_id]
    spec.config.bos_token = spec.config.unk_token = words[model.config.pad_token_id]
    spec.config.eos_token = words[model.config.eos_token_id]
    spec.validate()
    spec.optimize(quantization=CTRANSLATE2_TYPES[precision])
    to = Path(tempfile.mkdtemp(dir=folder))
    spec.save(str(to))
    return to


def ctranslate2_translator(folder: Path, precision: str, device: str, workers: bool) -> Any:
    import ctranslate2

    if device == "cuda" and not ctranslate2.get_cuda_device_count():
        raise ImportError("this build of CTranslate2 finds no GPU")
    path, threads = str(ctranslate2_folder(folder, precision)), torch.get_num_threads()
    inter, intra = (threads, 1) if workers else (1, threads)
    return ctranslate2.Translator(path, device=device, inter_threads=inter, intra_threads=intra)


def ctranslate2(folder: Path, precision: str, device: str, workers: bool = False) -> Search:
    model = ctranslate2_translator(folder, precision, device, workers)
    share = torch.get_num_threads() if workers else 1

    def search(source: torch.Tensor, beams: int) -> Rows:
        results = model.translate_batch(
            [[str(token) for token in row] for row in source.tolist()],
            beam_size=beams,
            min_decoding_length=TARGET,
            max_decoding_length=TARGET,
            max_batch_size=math.ceil(len(source) / share),
        )
        return [[int(word) for word in result.hypotheses[0]] for result in results]

    return search


def system(name: str, what: str, folder: Path, device: str) -> Search:
    """The search that a name such as 'ours int8' selects; peers read a Marian folder."""
    kind, precision = name.rsplit(" ", 1)
    match kind:
        case "ours" | "eager":
            return ours(random_model(what), precision, device, kind == "eager")
        case "HF" | "HF static":
            return hugging_face(folder, precision, device, kind == "HF static")
        case "CTranslate2" | "CTranslate2 workers":
            return ctranslate2(folder, precision, device, kind == "CTranslate2 workers")
        case _:
            raise SystemExit(f"--systems {name}: the known ones are ours and {', '.join(SETTINGS)}")


def random_model(what: str) -> Model:
    torch.manual_seed(0)
    model: Model
    match what:
        case "generate":
            model = LanguageModel(LanguageConfig(VOCABULARY))
            table = model.tokens.table
        case _:
            config = TransformerConfig.base(VOCABULARY)
            if what == "read":
                config = replace(config, source=ImageSource(image=IMAGE, patch=8, channels=1))
            model = Transformer(config)
            table = model.target.table
    # Vectors that differ more leave fewer near ties.
    torch.nn.init.normal_(table.weight, std=0.1)
    return model.eval()


def sources(what: str, sentences: int, device: str) -> torch.Tensor:
    torch.manual_seed(sentences)
    if what == "read":
        return torch.randn(sentences, 1, *IMAGE).to(device)
    return torch.randint(2, VOCABULARY, (sentences, SOURCE)).to(device)


class Worker:
    """A system in a process of its own, so that threads of different libraries do not compete."""

    def __init__(self, name: str, what: str, folder: Path):
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        given = (other, name, what, folder, torch.get_num_threads())
        self.process = context.Process(target=_serve, args=given, daemon=True)
        with mock.patch.dict(os.environ):
            if name.startswith("ours"):
                share_cores()  # as the command line does
            self.process.start()
        if error := self.pipe.recv():
            raise ImportError(error)

    def __call__(self, source: torch.Tensor, beams: int) -> tuple[float, Rows]:
        time.sleep(SPIN)
        self.pipe.send((source.tolist(), beams))
        return self.pipe.recv()


def _serve(pipe: Any, name: str, what: str, folder: Path, threads: int) -> None:
    torch.set_num_threads(threads)
    try:
        search = system(name, what, folder, "cpu")
    except ImportError as error:
        pipe.send(str(error))
        return
    pipe.send("")
    with contextlib.suppress(EOFError):  # until the pipe is closed
        while True:
            rows, beams = pipe.recv()
            pipe.send(timed(search, torch.tensor(rows), beams))


def timed(search: Search, source: torch.Tensor, beams: int) -> tuple[float, Rows]:
    """The seconds of a search, and its tokens."""
    start = time.perf_counter()
    tokens = search(source, beams)  # lists: all work is done
    return time.perf_counter() - start, tokens


# Random weights


def random_weights(options: argparse.Namespace) -> None:
    what = options.model or "translate"
    searches: dict[str, Callable[[torch.Tensor, int], tuple[float, Rows]]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "marian"
        if what == "translate":
            write(random_model(what), folder, "marian", task=TASK)
        for name in options.systems:
            try:
                if options.device == "cpu":
                    searches[name] = Worker(name, what, folder)
                else:
                    searches[name] = partial(timed, system(name, what, folder, options.device))
            except ImportError as error:
                print(f"  {name} is left out: {error}")
        rows: list[list[str]] = []
        for beams, sentences in itertools.product(options.beams, options.sentences):
            rows += compare(searches, beams, sentences, options)
        if rows:
            print(f"\n{machine(options)}, tokens per second\n{markdown(HEAD, rows)}", flush=True)
        for worker in searches.values():
            if isinstance(worker, Worker):
                worker.pipe.close()
                worker.process.join()


def compare(
    searches: dict[str, Callable[[torch.Tensor, int], tuple[float, Rows]]],
    beams: int,
    sentences: int,
    options: argparse.Namespace,
) -> list[list[str]]:
    """Rows of the table."""
    source = sources(options.model or "translate", sentences, options.device)
    how = f"beam {beams}" if beams > 1 else "greedy"
    print(f"{sentences} sentences, {how}", flush=True)
    tokens = {}
    for name, run in searches.items():
        for _ in range(2):  # compiling is not timed
            _, tokens[name] = run(source, beams)
        assert all(len(row) == TARGET for row in tokens[name]), name
    busy: dict[str, list[float]] = {name: [] for name in searches}
    times: dict[str, list[float]] = {name: [] for name in searches}
    for _ in range(options.rounds):
        for name, run in searches.items():
            times[name].append(run(source, beams)[0])
        if options.busy:
            with busy_cores():
                for name, run in searches.items():
                    busy[name].append(run(source, beams)[0])
    if options.busy:
        report_busy(times, busy, sentences * TARGET)
        return []
    took = {name: statistics.median(values) for name, values in times.items()}
    first, beside = next(iter(tokens)), options.beside
    cells = {name: cell(sentences * TARGET / seconds) for name, seconds in took.items()}
    same = {name: agreement(rows, tokens[first]) for name, rows in tokens.items()}
    for name, speed in cells.items():
        spread = (max(times[name]) - min(times[name])) / took[name]
        ratios = (
            f"  {ratio(cells[beside], speed)} × the time of {beside}"
            if beside in cells and beside != name
            else ""
        )
        print(
            f"  {name:24} {speed:>9} tok/s ± {spread / 2:.0%}  {same[name]:6.1%} as "
            f"{first}{ratios}",
            flush=True,
        )
    if beside not in cells:
        return []
    usual = {name: agreement(tokens[name], tokens[default(name, tokens)]) for name in tokens}
    fair = {name: seconds for name, seconds in took.items() if usual[name] >= SAME}
    return table_rows(f"{sentences} sentences, {how}", beside, cells, fair)


def default(name: str, known: Iterable[str]) -> str:
    """The same library and precision, at its default settings: HF bf16 for HF static bf16."""
    words = name.split()
    usual = f"{words[0]} {words[-1]}"
    return usual if usual in known else name


HEAD = ("sentences, search", "ours", "", "a peer", "", "its settings", "ours / the peer")


def table_rows(
    title: str,
    beside: str,
    cells: dict[str, str],
    took: dict[str, float],
) -> list[list[str]]:
    """The fastest settings of each library."""
    best: dict[str, str] = {}
    for name in sorted(took, key=took.__getitem__, reverse=True):
        if not name.startswith("ours"):
            best[name.split()[0]] = name
    return [
        [
            *(title, beside, cells[beside], name, cells[name]),
            *(SETTINGS[name.rsplit(" ", 1)[0]], ratio(cells[beside], cells[name])),
        ]
        for _, name in sorted(best.items())
    ]


def report_busy(quiet: dict[str, list[float]], busy: dict[str, list[float]], tokens: int) -> None:
    """Speeds on a quiet and on a busy machine, and beside CTranslate2's of the same precision."""
    for name in quiet:
        peer = f"CTranslate2 {name.rsplit(' ', 1)[1]}"
        speeds = []
        for times in (quiet, busy):
            took = statistics.median(times[name])
            beside = statistics.median(times[peer]) / took if peer in times else math.nan
            speeds.append(f"{tokens / took:9,.0f} tok/s ({beside:5.2f} × {peer})")
        kept = statistics.median(quiet[name]) / statistics.median(busy[name])
        print(f"  {name:18} quiet {speeds[0]}  busy {speeds[1]}  {kept:4.0%} kept", flush=True)


# Runs until the parent process has ended.
_BUSY = """
import os
began = os.getppid()
while os.getppid() == began:
    for _ in range(10**6):
        pass
"""


@contextlib.contextmanager
def busy_cores() -> Iterator[None]:
    """Keeps half of the cores, at least one, busy at the lowest priority."""
    words = ["nice", "-n", "19", sys.executable, "-c", _BUSY]
    count = max(1, (os.cpu_count() or 1) // 2)
    loops = [subprocess.Popen(words, start_new_session=True) for _ in range(count)]
    time.sleep(0.2)
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def agreement(rows: Rows, others: Rows) -> float:
    """The share of tokens before which, and in which, two systems agree."""
    same = 0
    for row, other in zip(rows, others):
        pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(row, other))
        same += sum(1 for _ in pairs)
    return same / sum(map(len, rows))


# A trained model


def trained(options: argparse.Namespace) -> None:
    import sacrebleu

    from regard.task.folder import model_folder

    source, target = (
        Path(name).read_text().splitlines() for name in (options.source, options.target)
    )
    cuda = options.device == "cuda"
    searches: dict[str, Callable[[int], Sequence[str]]] = {}
    for precision in ("bf16",) if cuda else ("fp32", "bf16", "int8"):
        dtype = DTYPES.get(precision, torch.float32)
        ready = Translator.load(options.model, device=options.device, dtype=dtype)
        if precision == "int8":
            int8(ready.model)
        searches[f"ours {precision}"] = lambda beams, ready=ready: ready.translate(  # type: ignore[misc]
            source, beams=beams, batch=options.batch
        )
    peers = ["HF bf16", "CTranslate2 bf16", "CTranslate2 fp16"]
    if not cuda:
        peers = ["HF fp32", "HF bf16", "CTranslate2 fp32", "CTranslate2 int8"]
        peers.append("CTranslate2 workers int8")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "marian"
        ready = Translator.load(options.model)
        try:
            write(
                ready.model,
                folder,
                "marian",
                task=checkpoint.load(model_folder(options.model)).task,
            )
        except ValueError as error:
            print(f"  the peers are left out: {error}")
            peers = []
        for name in peers:
            make = text_to_text if name.startswith("CTranslate2") else hugging_face_text
            try:
                searches[name] = make(folder, name, options, ready, source)
            except ImportError as error:
                print(f"  {name} is left out: {error}")
        first, beside = next(iter(searches)), "ours bf16" if cuda else "ours int8"
        rows: list[list[str]] = []
        for beams in options.beams:
            how = f"beam {beams}" if beams > 1 else "greedy"
            print(f"{len(source):,} lines, {how}", flush=True)
            texts = {name: run(beams) for name, run in searches.items()}
            times: dict[str, list[float]] = {name: [] for name in searches}
            for _ in range(options.rounds):
                for name, run in searches.items():
                    start = time.perf_counter()
                    texts[name] = run(beams)
                    times[name].append(time.perf_counter() - start)
            took = {name: statistics.median(values) for name, values in times.items()}
            cells = {name: cell(len(source) / seconds) for name, seconds in took.items()}
            for name, speed in cells.items():
                bleu = sacrebleu.corpus_bleu(list(texts[name]), [target])
                same = sum(map(str.__eq__, texts[name], texts[first])) / len(source)
                print(
                    f"  {name:24} {speed:>9} lines/s  BLEU {bleu.score:.2f}  {same:.1%} of lines "
                    f"as {first}",
                    flush=True,
                )
            rows += table_rows(f"{len(source):,} lines, {how}", beside, cells, took)
        print(
            f"\n{machine(options)}, lines per second, batches of {options.batch}\n"
            f"{markdown(HEAD, rows)}",
            flush=True,
        )


def text_to_text(
    folder: Path, name: str, options: argparse.Namespace, ready: Translator, source: Sequence[str]
) -> Callable[[int], Sequence[str]]:
    """CTranslate2 on texts."""
    kind, precision = name.rsplit(" ", 1)
    model = ctranslate2_translator(folder, precision, options.device, kind == "CTranslate2 workers")
    settings = ready.search

    def run(beams: int) -> Sequence[str]:
        words = [
            [str(token) for token in (*ready.source_tokenizer.encode(line.strip()), settings.end)]
            for line in source
        ]
        results = model.translate_batch(
            words,
            max_batch_size=options.batch,
            beam_size=beams,
            length_penalty=settings.length_penalty,
        )
        return [
            ready.tokenizer.decode([int(word) for word in result.hypotheses[0]])
            for result in results
        ]

    return run


def hugging_face_text(
    folder: Path, name: str, options: argparse.Namespace, ready: Translator, source: Sequence[str]
) -> Callable[[int], Sequence[str]]:
    """Their generate on texts, in batches of lines of like lengths."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model: Any = transformers.MarianMTModel.from_pretrained(folder, dtype=DTYPES[name.split()[-1]])
    model = model.to(options.device).eval()
    settings, pad = ready.search, model.config.pad_token_id

    def run(beams: int) -> Sequence[str]:
        rows = [
            torch.tensor([*ready.source_tokenizer.encode(line.strip()), settings.end])
            for line in source
        ]
        order = sorted(range(len(rows)), key=lambda n: -len(rows[n]))
        texts = [""] * len(rows)
        for begin in range(0, len(order), options.batch):
            batch = order[begin : begin + options.batch]
            ids = pad_sequence([rows[n] for n in batch], True, pad).to(options.device)
            with torch.inference_mode():
                out = model.generate(
                    ids,
                    attention_mask=(ids != pad).long(),
                    num_beams=beams,
                    do_sample=False,
                    length_penalty=settings.length_penalty if beams > 1 else None,
                    max_new_tokens=2 * ids.shape[1] + 10,
                )
            for n, tokens in zip(batch, out[:, 1:].tolist()):
                texts[n] = ready.tokenizer.decode(
                    list(itertools.takewhile(lambda token: token != settings.end, tokens))
                )
        return texts

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sentences", type=int, nargs="+", default=None)
    parser.add_argument("--beams", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--busy", action="store_true", help="on a busy machine as well")
    parser.add_argument("--isa", choices=["avx2"], help="use no better instructions; peers too")
    parser.add_argument("--systems", nargs="+", default=None, help="such as 'ours int8' 'HF bf16'")
    parser.add_argument("--model", help="read, generate, or a trained model's folder")
    parser.add_argument("--source", help="a file with a sentence in each line")
    parser.add_argument("--target", help="its translation")
    parser.add_argument("--batch", type=int, default=64, help="lines of --source at a time")
    options = parser.parse_args()
    if options.isa:
        os.environ["REGARD_CPU_ISA"] = options.isa
        os.environ["CT2_FORCE_CPU_ISA"] = options.isa.upper()
        os.environ["ATEN_CPU_CAPABILITY"] = options.isa
        os.environ["ONEDNN_MAX_CPU_ISA"] = options.isa.upper()
    if options.model not in (None, "read", "generate"):
        trained(options)
        return
    cuda = options.device == "cuda"
    options.sentences = options.sentences or ([1, 64, 512] if cuda else [1, 16, 64])
    options.beside = "ours bf16" if cuda else "ours int8"
    static = ["HF static bf16"] if cuda else []
    if options.model and not options.systems:
        options.systems = ["ours bf16", "eager bf16"] if cuda else ["ours int8", "ours fp32"]
    if options.busy and not options.systems:
        options.systems = ["ours int8", "CTranslate2 int8", "ours fp32", "CTranslate2 fp32"]
    options.systems = options.systems or (
        ["ours bf16", "HF bf16", *static, "CTranslate2 bf16", "CTranslate2 fp16"]
        if cuda
        else [
            *("ours fp32", "HF fp32", "CTranslate2 fp32", "ours int8", "HF bf16"),
            *("CTranslate2 int8", "CTranslate2 workers int8"),
        ]
    )
    print(machine(options), flush=True)
    random_weights(options)


def machine(options: argparse.Namespace) -> str:
    cuda = options.device == "cuda"
    where = torch.cuda.get_device_name() if cuda else f"{torch.get_num_threads()} threads"
    return f"torch {torch.__version__}, {where}"


if __name__ == "__main__":
    main()
