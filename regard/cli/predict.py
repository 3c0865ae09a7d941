"""The commands that apply a trained model to texts or pictures.

echo "…" | regard translate RUN        a line for each line, in order, as they are ready
regard translate RUN text.en …         the same for files, and for those in folders
regard score RUN pairs.tsv …           the log p of each translation in a file
regard classify RUN picture.png …      a label and its probability for each picture, or of a folder
find … | regard classify RUN           the same for names from a pipe
regard read RUN picture.png …          the text in each picture
echo "…" | regard generate RUN         a continuation of each line
echo "…" | regard label RUN            a label for each line
"""

import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from regard.cli.arguments import with_inputs
from regard.cli.inference import (
    EnsembleOptions,
    InferenceOptions,
    load_ensemble,
    load_model,
    report_fallback,
)
from regard.cli.output import LeftOut, as_object, awaited, each, say, without_answer, write
from regard.cli.stream import STDIN, Line, Lines, Unreadable, answers
from regard.data.files import LINE
from regard.machine.processes import Processes, launched
from regard.task.settings import check_positive

if TYPE_CHECKING:
    from torch import Tensor

    from regard.look.align import Found
    from regard.task.translator import Translator, Written

Settings = TypeVar("Settings")
Reads = TypeVar("Reads", bound="Translate | Score | Generate | Label")


@dataclass(frozen=True)
class Translate(EnsembleOptions):
    """Translates standard input, or files, line by line: a line for each line, in order."""

    files: tuple[str, ...] = ()
    """Files to translate, one after the other, instead of standard input; plain or compressed."""
    beams: int | None = None
    """Beam size; 1 is greedy search. By default that of the model's config.json."""
    batch: int | None = None
    """Batch size in sentences; by default 64 on a CPU and 512 on a GPU."""
    n_best: int | None = None
    """Print the n best translations of each line as an n-best list: line number (from 0) |||
    translation ||| score. The score, by which they are ranked, is log p / length^penalty, with the
    model's length penalty; --scores appends log p itself."""
    scores: bool = False
    """Append ||| log p of the translation ||| log p of each of its tokens, </s> included. Unlike
    the score of --n-best, neither is divided by a length."""
    align: bool = False
    """Add ||| word alignments: 0-1 is the first word of the source and the second of the
    translation. Words are what white space separates."""
    prefix: str = ""
    """Forced prefix: every translation begins with this text."""
    prefix_column: bool = False
    """Forced prefixes, one for each line: source, a tab, and how its translation must begin."""
    tag: tuple[str, ...] = ()
    """Tags for a model that was trained with tags, such as the target language."""
    longest: int = 20_000
    """Maximum length of a line in characters; longer ones are left out."""
    head: tuple[int, int, int] | None = None
    """Attention head for word alignments: layer, head, and 1 for the weights after a word is
    written, else 0. By default it is chosen on pairs that the run's folder keeps, or else on
    the first lines."""
    json: bool = False
    """One JSON object for each line, for programs: line, source and translations, each with text
    and score, which is that of --n-best. --scores adds log_p, and tokens with the log_p of each;
    --align adds alignment, pairs of words."""

    def __post_init__(self) -> None:
        check_positive(self, "beams", "batch", "n_best", "longest")
        if self.prefix and self.prefix_column:
            raise ValueError("prefix and prefix_column both set how translations begin; give one")


def translate(words: Sequence[str]) -> int:
    from regard.decode.batching import usual
    from regard.task.translator import NOTHING

    folder, options = _with_files("translate", Translate, Translate(), words)
    with launched() as here:
        lines, model = here.agreed(
            lambda: (
                Lines(options.files, options.longest),
                _translator(folder, options, here),
            )
        )

        head_note: str | None = None

        def answer(lines: list[Line]) -> Iterator[str]:
            sources, prefixes = _prefixed([text for _, text in lines], options)
            translations = model.translations(
                sources,
                n_best=options.n_best or 1,
                beams=options.beams,
                batch=options.batch,
                prefix=prefixes,
                tags=options.tag,
                align=options.align,
                low_latency=False,
            )
            for (number, _), source, best in zip(lines, sources, translations):
                yield _format(number, source, best, model, options)

        def prepare(sample: list[str]) -> None:
            nonlocal head_note
            if options.align and model.head is None:
                found = model.find_head(_prefixed(sample, options)[0])
                head_note = None if found is None else _head_note(found)

        def without(number: int, reason: str) -> str:
            if options.json:
                return as_object(line=number, error=reason)
            return _format(number, "", [NOTHING], model, options)

        # Enough lines to fill batches with lines of similar length.
        at_once = 32 * (options.batch or usual(next(model.model.parameters()).device))
        outputs = answers(lines, answer, here, prepare, at_once, awaited())
        status = write(lines, outputs, without, lambda: head_note)
        report_fallback(model.model, options, here)
        return status


def _prefixed(lines: list[str], options: Translate) -> tuple[list[str], str | list[str]]:
    """The sources, and the prefixes of their translations; a line has one line of translation."""
    lines = [" ".join(line.splitlines()) for line in lines]
    if not options.prefix_column:
        return lines, options.prefix
    cells = [line.partition("\t") for line in lines]
    return [source for source, _, _ in cells], [prefix for _, _, prefix in cells]


def _translator(folder: Path, options: Translate, here: Processes) -> "Translator":
    from regard.task.search import check_search
    from regard.task.translator import Translator, check_tags

    model = load_ensemble(folder, options, Translator, here)
    check_tags(model, options.tag)
    beams = max(options.beams or model.search.beams, options.n_best or 1)
    check_search(model.model.config, beams, model.model.target.table.weight.device)
    if options.head is not None:
        from regard.look.align import Head

        layers, heads = len(model.model.decoder.blocks), model.model.config.heads
        layer, head, shift = options.head
        if not (1 <= layer <= layers and 1 <= head <= heads and shift in (0, 1)):
            raise ValueError(
                f"head ({layer} {head} {shift}): layer must be 1 to {layers}, head 1 to {heads}, "
                "shift 0 or 1; leave it out to choose the head automatically"
            )
        model.head = Head(layer - 1, head - 1, shift)
    return model


def _format(
    number: int, source: str, best: "Sequence[Written]", model: "Translator", options: Translate
) -> str:
    """Formats a line's translations as lines; no translation contains a line break."""
    if options.json:
        entries = []
        for candidate in best:
            entry: dict[str, object] = {"text": candidate.text, "score": candidate.score}
            if options.scores:
                ended = len(candidate.token_scores) > len(candidate.tokens)
                signs = [*candidate.tokens, model.search.end] if ended else candidate.tokens
                entry["log_p"] = candidate.log_p
                entry["tokens"] = [
                    {"token": piece, "log_p": score}
                    for piece, score in zip(model.tokenizer.pieces(signs), candidate.token_scores)
                ]
            if options.align:
                entry["alignment"] = candidate.alignment
            entries.append(entry)
        return as_object(line=number, source=source, translations=entries)
    rows = []
    for candidate in best:
        row = [candidate.text]
        if options.n_best is not None:
            row = [str(number), candidate.text, f"{candidate.score:.6g}"]
        if options.scores:
            row += [
                f"{candidate.log_p:.6g}",
                " ".join(f"{score:.6g}" for score in candidate.token_scores),
            ]
        if options.align:
            row.append(
                " ".join(f"{source}-{target}" for source, target in candidate.alignment or ())
            )
        rows.append(" ||| ".join(row))
    return "\n".join(rows)


def _head_note(found: "Found") -> str:
    """Describes the head for word alignments that was chosen automatically."""
    head, share = found.best, float(found.shares.max())
    again = f"--head {head.layer + 1} {head.head + 1} {head.shift}"
    return (
        f"word alignments are those of {head}, which reaches {share:.0%} of the best by "
        f"leave-one-out; {again} skips the search"
    )


@dataclass(frozen=True)
class Score(EnsembleOptions):
    """Scores given translations: of each line, source and translation with a tab between them, the
    log p of the translation."""

    files: tuple[str, ...] = ()
    """Files of such lines, one after the other, instead of standard input; plain or compressed."""
    normalize: bool = False
    """Divide log p by length^penalty, as search does with the model's length penalty."""
    tokens: bool = False
    """Append ||| log p of each token, </s> included."""
    batch: int = 64
    """Batch size in sentences."""
    longest: int = 40_000
    """Maximum length of a line in characters; longer ones are left out."""
    json: bool = False
    """One JSON object for each line, for programs: line, source, target, log_p, and score, which is
    what --normalize prints. --tokens adds tokens, with the log_p of each."""

    def __post_init__(self) -> None:
        check_positive(self, "batch", "longest")


def score(words: Sequence[str]) -> int:
    from regard.task.translator import Translator

    folder, options = _with_files("score", Score, Score(), words)
    model = load_ensemble(folder, options, Translator)
    counted: list[float] = []

    def answer(lines: list[Line]) -> Iterator[str]:
        pairs = []
        for number, line in lines:
            source, tab, target = line.partition("\t")
            if not (tab and source.strip() and target.strip()):
                raise ValueError(f"line {number + 1:,} needs a source, a tab and a translation")
            pairs.append((source, target))
        scored = model.score(pairs, batch=options.batch)
        for (number, _), (source, _), result in zip(lines, pairs, scored):
            counted.extend(result.token_scores)
            value = result.score if options.normalize else result.log_p
            if options.json:
                pieces = model.tokenizer.pieces([*result.tokens, model.search.end])
                tokens = [
                    {"token": token, "log_p": p} for token, p in zip(pieces, result.token_scores)
                ]
                yield as_object(
                    line=number,
                    source=source,
                    target=result.text,
                    score=result.score,
                    log_p=result.log_p,
                    **({"tokens": tokens} if options.tokens else {}),
                )
            else:
                row = [f"{value:.6g}"]
                if options.tokens:
                    row.append(" ".join(f"{p:.6g}" for p in result.token_scores))
                yield " ||| ".join(row)

    lines = Lines(options.files, options.longest)
    status = write(lines, answers(lines, answer, Processes()), without_answer(options.json))
    if counted:
        perplexity = math.exp(min(-math.fsum(counted) / len(counted), 700.0))
        print(f"regard: perplexity {perplexity:.4g} over {len(counted):,} tokens", file=sys.stderr)
    return status


@dataclass(frozen=True)
class Classify(InferenceOptions):
    """Classifies images."""

    top: int = 1
    """How many labels of each image, the most probable first (top-k)."""
    json: bool = False
    """One JSON object for each picture, for programs."""

    def __post_init__(self) -> None:
        check_positive(self, "top")


def classify(words: Sequence[str]) -> int:
    from regard.task.classify import Classifier

    folder, pictures, options = _pictures("classify", Classify, Classify(), words)
    model = load_model(folder, options, Classifier)
    left_out = LeftOut()
    for picture, probabilities in each(pictures, model.probabilities, options.json, left_out):
        best = _best(probabilities, model.labels, options.top)
        if options.json:
            labels = [{"label": label, "probability": p} for label, p in best]
            say(as_object(picture=picture, labels=labels))
        else:
            say("\t".join([picture, *(f"{label} {p:.1%}" for label, p in best)]))
    return left_out.status()


@dataclass(frozen=True)
class Read(InferenceOptions):
    """Reads the text in images."""

    beams: int | None = None
    """Beam size; 1 is greedy search. By default that of the model's config.json."""
    json: bool = False
    """One JSON object for each picture, for programs."""

    def __post_init__(self) -> None:
        check_positive(self, "beams")


def read(words: Sequence[str]) -> int:
    from regard.task.read import Reader
    from regard.task.search import check_search

    folder, pictures, options = _pictures("read", Read, Read(), words)
    model = load_model(folder, options, Reader)
    device = model.model.target.table.weight.device
    check_search(model.model.config, options.beams or model.search.beams, device)
    left_out = LeftOut()

    def answer(names: list[str]) -> list[str]:
        return model.read(names, beams=options.beams)

    for picture, text in each(pictures, answer, options.json, left_out):
        if options.json:
            say(as_object(picture=picture, text=text))
        else:
            say(f"{picture}\t{text}")
    report_fallback(model.model, options)
    return left_out.status()


@dataclass(frozen=True)
class Generate(EnsembleOptions):
    """Continues each line of standard input, or of files, with a language model."""

    files: tuple[str, ...] = ()
    """Files with a prompt in each line, instead of standard input."""
    length: int = 200
    """Maximum number of new tokens."""
    temperature: float = 0.8
    """Sampling temperature; 0 is greedy search."""
    top_k: int | None = None
    """Top-k sampling: sample from the k most probable tokens."""
    top_p: float | None = 0.95
    """Nucleus (top-p) sampling: sample from the most probable tokens that together have this
    probability."""
    seed: int = 0
    """Random seed; prompt n is sampled from (seed, n)."""
    longest: int = LINE
    """Maximum length of a line in characters; longer ones are left out."""
    json: bool = False
    """One JSON object for each line, for programs."""

    def __post_init__(self) -> None:
        check_positive(self, "length", "top_k", "longest")
        if not self.temperature >= 0:
            raise ValueError(f"temperature ({self.temperature}) must be 0 or more")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p ({self.top_p}) must be above 0 and at most 1; try 0.9")
        if self.seed < 0:
            raise ValueError(f"seed ({self.seed}) must be 0 or more")


def generate(words: Sequence[str]) -> int:
    from regard.model.fits import check_cache
    from regard.task.language import Generator

    folder, options = _with_files("generate", Generate, Generate(), words)
    model = load_ensemble(folder, options, Generator)
    device = model.model.tokens.table.weight.device
    check_cache(model.model.config, 1, 1, options.length, device)

    def answer(lines: list[Line]) -> Iterator[str]:
        # Each line is sampled from its own number; skipped lines have numbers too.
        for _, group in groupby(enumerate(lines), lambda item: item[1][0] - item[0]):
            run = [line for _, line in group]
            texts = model.generate(
                [text for _, text in run],
                length=options.length,
                temperature=options.temperature,
                top_k=options.top_k,
                top_p=options.top_p,
                seed=options.seed,
                first=run[0][0],
            )
            for (number, prompt), text in zip(run, texts):
                if options.json:
                    yield as_object(line=number, prompt=prompt, text=text)
                else:
                    yield " ".join(text.splitlines())

    lines = Lines(options.files, options.longest)
    outputs = answers(lines, answer, Processes())
    status = write(lines, outputs, without_answer(options.json))
    report_fallback(model.model, options)
    return status


@dataclass(frozen=True)
class Label(InferenceOptions):
    """Classifies each line of standard input, or of files."""

    files: tuple[str, ...] = ()
    """Files with a text in each line, instead of standard input."""
    top: int = 1
    """How many labels of each text, the most probable first (top-k)."""
    longest: int = LINE
    """Maximum length of a line in characters; longer ones are left out."""
    json: bool = False
    """One JSON object for each line, for programs."""

    def __post_init__(self) -> None:
        check_positive(self, "top", "longest")


def label(words: Sequence[str]) -> int:
    from regard.task.label import Labeler

    folder, options = _with_files("label", Label, Label(), words)
    model = load_model(folder, options, Labeler)

    def answer(lines: list[Line]) -> Iterator[str]:
        rows = model.probabilities([text for _, text in lines])
        for (number, text), row in zip(lines, rows):
            best = _best(row, model.labels, options.top)
            if options.json:
                labels = [{"label": label, "probability": p} for label, p in best]
                yield as_object(line=number, text=text, labels=labels)
            else:
                yield "\t".join(f"{label}\t{p:.1%}" for label, p in best)

    lines = Lines(options.files, options.longest)
    return write(lines, answers(lines, answer, Processes()), without_answer(options.json))


# Words


def _with_files(
    name: str, kind: type[Reads], default: Reads, words: Sequence[str]
) -> tuple[Path, Reads]:
    """Parses the options; names after the folder are added to --files."""
    folder, names, options = with_inputs(name, kind, default, words, " [FILE ...]")
    return folder, replace(options, files=(*options.files, *names))


def _pictures(
    name: str, kind: type[Settings], default: Settings, words: Sequence[str]
) -> tuple[Path, Iterator[str | None], Settings]:
    """The folder, the names of pictures (None if no more are available yet) and the options."""
    folder, names, options = with_inputs(name, kind, default, words, " [IMAGE ...]")
    listed = names in ([], [STDIN])
    if listed and sys.stdin.isatty():
        raise ValueError(
            f"{name} needs pictures: regard {name} {folder} picture.png …, a folder of them, or "
            "their names on standard input"
        )
    return folder, _expand_folders(name, Lines() if listed else names), options


def _expand_folders(command: str, names: Iterable[str | Unreadable | None]) -> Iterator[str | None]:
    """Yields the named pictures, and the pictures in named folders."""
    from regard.data.image import images_in
    from regard.data.problems import Problems

    is_empty = True
    for line in names:
        if line is None:
            yield None
            continue
        if isinstance(line, Unreadable):
            raise ValueError(f"standard input must be the names of pictures: {line.reason}")
        for name in filter(None, line.split("\0")):  # find -print0 and git ls-files -z
            is_empty = False
            if os.path.isdir(name):
                yield from map(str, images_in(Path(name), Problems()))
            else:
                yield name
    if is_empty:
        raise ValueError(f"{command} needs pictures, and none was named: files, folders, or a list")


def _best(probabilities: "Tensor", labels: Sequence[str], top: int) -> list[tuple[str, float]]:
    """The most probable labels; equally probable ones in their order."""
    values, places = probabilities.sort(stable=True, descending=True)
    return [(labels[n], p) for n, p in zip(places.tolist(), values.tolist())][:top]
