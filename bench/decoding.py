"""Our search beside the peers': the same weights, sentences and lengths, greedily and by beams.

    random weights   the base Transformer (6 + 6 layers, width 512, 16,000 tokens), 20 tokens in and
                     exactly 30 out, on a CPU against Hugging Face's generate and CTranslate2, on
                     CUDA against generate. The encoder counts. What is found in float32 is
                     compared, token by token.
    other models     --model read or generate: the same decoder reading images of 32 × 256 pixels,
                     and a language model of 6 layers, beside their own modules run eagerly.
    a trained model  --model RUN --source FILE --target FILE: the lines of a real test set, from
                     text to text, and BLEU beside the speed.
    a busy machine   --busy: random weights, with and without processes that never rest on half of
                     the cores, of the lowest priority (nice -n 19). They are like programs in
                     another terminal: for Linux a priority counts among programs of one session,
                     and sessions have equal shares.

Speeds are tokens found per second, best hypotheses alone. Ratios are a peer's time divided by
ours: above 1, ours is faster. All take turns in one run, each in a process of its own on a CPU, and
each keeps its median.
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

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
"""Seconds for which threads of the system before may still spin, as Intel OpenMP's do."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

Rows = list[list[int]]
Search = Callable[[torch.Tensor, int], Rows]
"""From ids (B, S) and the number of beams to the tokens found."""


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
                return [found.tokens for found in greedy(session, prompts, **limits)]
            best = beam(session, prompts, width=beams, penalty=power(1.0), **limits)
            return [found[0].tokens for found in best]

    return search


def hugging_face(folder: Path, precision: str, device: str) -> Search:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    load = transformers.MarianMTModel.from_pretrained
    model = load(folder, dtype=DTYPES[precision]).to(device).eval()
    model.generation_config.forced_eos_token_id = None

    def search(source: torch.Tensor, beams: int) -> Rows:
        with torch.inference_mode():
            out = model.generate(
                source,
                attention_mask=torch.ones_like(source),
                num_beams=beams,
                do_sample=False,
                min_new_tokens=TARGET,
                max_new_tokens=TARGET,
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
    spec.optimize(quantization={"fp32": "float32", "int8": "int8"}[precision])
    to = folder / f"ctranslate2-{precision}"
    to.mkdir()
    spec.save(str(to))
    return to


def ctranslate2(folder: Path, precision: str, device: str) -> Search:
    import ctranslate2

    path = str(ctranslate2_folder(folder, precision))
    threads = torch.get_num_threads()
    model = ctranslate2.Translator(path, device=device, inter_threads=1, intra_threads=threads)

    def search(source: torch.Tensor, beams: int) -> Rows:
        found = model.translate_batch(
            [[str(token) for token in row] for row in source.tolist()],
            beam_size=beams,
            min_decoding_length=TARGET,
            max_decoding_length=TARGET,
        )
        return [[int(word) for word in result.hypotheses[0]] for result in found]

    return search


def system(name: str, what: str, folder: Path, device: str) -> Search:
    """One of them by its name, such as 'ours int8'; the peers' weights are in a Marian folder."""
    kind, precision = name.rsplit(" ", 1)
    if kind in ("ours", "eager"):
        return ours(random_model(what), precision, device, kind == "eager")
    return {"HF": hugging_face, "CTranslate2": ctranslate2}[kind](folder, precision, device)


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
    # The more the vectors differ, the less do near ties decide what is found.
    torch.nn.init.normal_(table.weight, std=0.1)
    return model.eval()


def sources(what: str, sentences: int, device: str) -> torch.Tensor:
    torch.manual_seed(sentences)
    if what == "read":
        return torch.randn(sentences, 1, *IMAGE).to(device)
    return torch.randint(2, VOCABULARY, (sentences, SOURCE)).to(device)


class Worker:
    """A system in a process of its own, so that no library's threads are in another's way."""

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
    with contextlib.suppress(EOFError):  # until nobody asks
        while True:
            rows, beams = pipe.recv()
            pipe.send(timed(search, torch.tensor(rows), beams))


def timed(search: Search, source: torch.Tensor, beams: int) -> tuple[float, Rows]:
    """How long it took, and what was found."""
    start = time.perf_counter()
    found = search(source, beams)  # lists: all work is done
    return time.perf_counter() - start, found


# Random weights


def random_weights(options: argparse.Namespace) -> None:
    what = options.model or "translate"
    everyone: dict[str, Callable[[torch.Tensor, int], tuple[float, Rows]]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "marian"
        if what == "translate":
            write(random_model(what), folder, "marian", task=TASK)
        for name in options.systems:
            try:
                if options.device == "cpu":
                    everyone[name] = Worker(name, what, folder)
                else:
                    everyone[name] = partial(timed, system(name, what, folder, options.device))
            except ImportError as error:
                print(f"  {name} is left out: {error}")
        for beams, sentences in itertools.product(options.beams, options.sentences):
            compare(everyone, beams, sentences, options)
        for one in everyone.values():
            if isinstance(one, Worker):
                one.pipe.close()
                one.process.join()


def compare(
    everyone: dict[str, Callable[[torch.Tensor, int], tuple[float, Rows]]],
    beams: int,
    sentences: int,
    options: argparse.Namespace,
) -> None:
    source = sources(options.model or "translate", sentences, options.device)
    print(f"{sentences} sentences, {f'beam {beams}' if beams > 1 else 'greedy'}", flush=True)
    found = {}
    for name, run in everyone.items():
        for _ in range(2):  # what happens once is not what is timed
            _, found[name] = run(source, beams)
        assert all(len(row) == TARGET for row in found[name]), name
    busy: dict[str, list[float]] = {name: [] for name in everyone}
    times: dict[str, list[float]] = {name: [] for name in everyone}
    for _ in range(options.rounds):
        for name, run in everyone.items():
            times[name].append(run(source, beams)[0])
        if options.busy:
            with busy_cores():
                for name, run in everyone.items():
                    busy[name].append(run(source, beams)[0])
    if options.busy:
        report_busy(times, busy, sentences * TARGET)
        return
    took = {name: statistics.median(some) for name, some in times.items()}
    first = next(iter(everyone))
    for name, seconds in took.items():
        speed = sentences * TARGET / seconds
        spread = (max(times[name]) - min(times[name])) / seconds
        ratios = "".join(
            f"  {seconds / took[one]:5.2f} × the time of {one}"
            for one in options.beside
            if one in took and one != name
        )
        same = agreement(found[name], found[first])
        print(
            f"  {name:18} {speed:9,.0f} tok/s ± {spread / 2:.0%}  {same:6.1%} as {first}{ratios}",
            flush=True,
        )


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


# Until whoever started it has gone, by whatever way.
_BUSY = """
import os
began = os.getppid()
while os.getppid() == began:
    for _ in range(10**6):
        pass
"""


@contextlib.contextmanager
def busy_cores() -> Iterator[None]:
    """Half of the cores, one at least, have something else to do, of the lowest priority."""
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


def agreement(some: Rows, others: Rows) -> float:
    """The share of tokens before which, and in which, two systems agree."""
    same = 0
    for one, other in zip(some, others):
        pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other))
        same += sum(1 for _ in pairs)
    return same / sum(map(len, some))


# A trained model


def trained(options: argparse.Namespace) -> None:
    import sacrebleu

    from regard import checkpoint
    from regard.task.folder import model_folder
    from regard.task.load import load

    source, target = (
        Path(name).read_text().splitlines() for name in (options.source, options.target)
    )
    everyone: dict[str, Callable[[int], Sequence[str]]] = {}
    for precision in ("fp32", "bf16", "int8"):
        dtype = DTYPES.get(precision, torch.float32)
        ready: Any = load(options.model, device=options.device, dtype=dtype)
        if precision == "int8":
            if options.device != "cpu":
                continue
            int8(ready.model)
        everyone[f"ours {precision}"] = lambda beams, ready=ready: ready.translate(  # type: ignore[misc]
            source, beams=beams, batch=options.batch
        )
    reason = ""
    with contextlib.ExitStack() as stack:
        if options.device == "cpu":
            try:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "marian"
                ready = load(options.model)
                write(
                    ready.model,
                    folder,
                    "marian",
                    task=checkpoint.load(model_folder(options.model)).task,
                )
                for precision in ("fp32", "int8"):
                    everyone[f"CTranslate2 {precision}"] = _translated(
                        folder, precision, ready, source, options.batch
                    )
            except (ImportError, ValueError) as error:
                reason = str(error)
    if reason:
        print(f"  CTranslate2 is left out: {reason}")
    texts: dict[str, Sequence[str]] = {}
    for beams in options.beams:
        print(f"{len(source):,} lines, {f'beam {beams}' if beams > 1 else 'greedy'}", flush=True)
        took: dict[str, float] = {}
        for run in everyone.values():
            run(beams)
        for _ in range(options.rounds):
            for name, run in everyone.items():
                start = time.perf_counter()
                texts[name] = run(beams)
                took[name] = min(took.get(name, 1e9), time.perf_counter() - start)
        for name, seconds in took.items():
            bleu = sacrebleu.corpus_bleu(list(texts[name]), [target])
            same = sum(a == b for a, b in zip(texts[name], texts["ours fp32"])) / len(source)
            words = sum(len(text.split()) for text in texts[name])
            print(
                f"  {name:18} {len(source) / seconds:7,.0f} lines/s {words / seconds:8,.0f} words/s"
                f"  BLEU {bleu.score:.2f}  {same:.1%} of lines as fp32",
                flush=True,
            )


def _translated(
    folder: Path, precision: str, ready: Any, source: Sequence[str], batch: int
) -> Callable[[int], Sequence[str]]:
    import ctranslate2

    path = str(ctranslate2_folder(folder, precision))
    threads = torch.get_num_threads()
    model = ctranslate2.Translator(path, inter_threads=1, intra_threads=threads)
    settings = ready.search

    def run(beams: int) -> Sequence[str]:
        words = [
            [str(token) for token in (*ready.source_tokenizer.encode(line.strip()), settings.end)]
            for line in source
        ]
        found = model.translate_batch(
            words, max_batch_size=batch, beam_size=beams, length_penalty=settings.length_penalty
        )
        return [ready.tokenizer.decode([int(word) for word in one.hypotheses[0]]) for one in found]

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
    options.beside = ["ours bf16"] if cuda else ["ours int8"]
    if options.model and not options.systems:
        options.systems = ["ours bf16", "eager bf16"] if cuda else ["ours int8", "ours fp32"]
    if options.busy and not options.systems:
        options.systems = ["ours int8", "CTranslate2 int8", "ours fp32", "CTranslate2 fp32"]
    options.systems = options.systems or (
        ["ours fp32", "HF fp32", "ours bf16", "HF bf16"]
        if cuda
        else [
            *("ours fp32", "HF fp32", "CTranslate2 fp32"),
            *("ours int8", "CTranslate2 int8", "HF bf16"),
        ]
    )
    where = torch.cuda.get_device_name() if cuda else f"{torch.get_num_threads()} threads"
    print(f"torch {torch.__version__}, {where}", flush=True)
    random_weights(options)


if __name__ == "__main__":
    main()
