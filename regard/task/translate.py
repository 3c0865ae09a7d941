"""Translation of any parallel text: two files, line by line, or a table with two columns.

    files → tokenizer (learned from them) → store of tokens → batches → Transformer → BLEU, chrF

The validation set is given, or split off by a hash of the source side, so that no source is in both
sets. `start` names a trained model to fine-tune, imported ones included.
"""

import hashlib
import heapq
import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from regard import checkpoint
from regard.data.diagnosis import Separator
from regard.data.files import LineFile, Reading
from regard.data.problems import reason
from regard.data.reading import shown
from regard.data.seeding import seeded
from regard.data.table import Column, tagged, tags_of
from regard.data.text import OnBad, Pairs, Rules, Store, Table, Text, store
from regard.data.tokenizer import AnyTokenizer, Tokenizer, read_pair
from regard.decode.engine.ensemble import Weights
from regard.model.encoder import TextEncoder
from regard.model.transformer import TextSource, Transformer, TransformerShape
from regard.task.folder import model_folder, run_config
from regard.task.search import SearchSettings
from regard.task.settings import (
    Precision,
    Preset,
    absolute,
    check_obeyed,
    check_preset,
    check_start,
    describe_reuse,
    recorded,
)
from regard.task.spec import Evaluation, TaskSpec
from regard.task.text import (
    Chosen,
    Progress,
    Transduction,
    build_transformer,
    check_share,
    compose,
    describe_unwritable,
)
from regard.task.translator import SAMPLE, Pair, Translator, check_tags, load_translators
from regard.train.config import TrainingConfig

Words: TypeAlias = Literal["joint", "separate", "characters"]
Cut: TypeAlias = Literal["13a", "intl", "zh", "char", "none"]

HELD_OUT = "held_out.jsonl"
"""File of the held-out pairs in a run's folder."""


def _tiny() -> TransformerShape:
    return TransformerShape(
        width=256,
        heads=4,
        feed_forward=512,
        encoder_layers=3,
        decoder_layers=3,
        norm="pre",
        position="rotary",
        dropout=0.1,
    )


def _short() -> TrainingConfig:
    return TrainingConfig(
        minutes=20.0,
        batch=4096,
        optimizer="muon",
        lr=1e-2,
        schedule="cosine",
        warmup=100,
        evaluate_every=250,
        save_every=250,
        ema=0.995,
    )


@dataclass(frozen=True)
class Config:
    """Translation of any parallel text."""

    source: tuple[str, ...] = ()
    """Source files, a sentence in each line; plain, or compressed: gz, xz, bz2, zst."""
    target: tuple[str, ...] = ()
    """Target files, one for each source file, line-aligned."""
    pairs: tuple[str, ...] = ()
    """Instead of source and target: tables with both sides: TSV or CSV, JSON lines
    (.jsonl) or Parquet."""
    columns: tuple[Column, Column] = (0, 1)
    """Which columns of those files are source and target: numbers from 0 on, or names, which TSV
    and CSV have in their first line; translation.en is within another."""
    tags: tuple[Column, ...] = ()
    """Columns whose values are put before the source as tags, such as the language to write:
    several languages in one model, of which regard translate RUN --tag de selects one."""
    separator: Separator | None = None
    """Column separator. By default .csv files have commas or semicolons, as their first lines show,
    and other files tabs. Cells may stand in quotes, except between tabs."""
    valid_source: tuple[str, ...] = ()
    """Validation set: source files. Without any, sentences are held out of the training data."""
    valid_target: tuple[str, ...] = ()
    """Validation set: target files."""
    valid_pairs: tuple[str, ...] = ()
    """Validation set: tables instead of valid-source and valid-target."""
    held_out: int = 1000
    """Number of sentences that are held out for validation, a tenth of all at most."""
    judged: int = 500
    """Validation sentences that are translated (by greedy search) at each evaluation. The best
    model translates all at the end, unless that would take over a twentieth of the training's
    time."""
    start: str | None = None
    """Fine-tune: the folder, or the run, of a translator, whose tokenizer and shape are kept; or of
    an encoder that was trained on text of both languages (regard train encoder), under a new
    decoder."""
    words: Words = "joint"
    """Tokenization: subwords (BPE) learned jointly from both languages, separately from each, or
    characters."""
    vocabulary: int = 8000
    """BPE vocabulary size, of each language where they are separate; smaller where the text has
    fewer merges."""
    tokenizer: str | None = None
    """A tokenizer.json to use for both languages instead of learning one."""
    longest: int = 250
    """Maximum sequence length in tokens, of each side; longer pairs are left out."""
    ratio: float | None = 9.0
    """Maximum length ratio of the two sides, in tokens."""
    on_bad: OnBad | None = None
    """Bad lines: count, show and leave them out (skip), or stop (refuse). By default they are left
    out, unless more than a tenth of the lines cannot be read."""
    cache: str | None = None
    """Cache folder for tokenized text; by default in the user's own cache."""
    beams: int = 4
    """Beam size when the trained model translates; 1 is greedy search, which evaluations while
    training take."""
    length_penalty: float = 1.0
    """Length penalty: log p is divided by the number of tokens to this power."""
    bleu: Cut = "13a"
    """sacreBLEU's tokenizer (--tokenize): zh for Chinese, char for languages without spaces."""
    r_drop: float = 0.0
    """R-Drop: weight of the divergence between two passes with different dropout, such as 5. It
    regularizes small data sets, and each step computes twice as much."""
    bpe_dropout: float = 0.0
    """Subword regularization: the probability with which a token of the training data is split into
    the two that it was merged from, anew at each step, such as 0.1 (cf. BPE-dropout)."""
    model: TransformerShape = field(default_factory=_tiny)
    """The model's shape."""
    training: TrainingConfig = field(default_factory=_short)
    """Optimizer, learning-rate schedule, batches, evaluation, checkpoints."""

    def __post_init__(self) -> None:
        for name in ("held_out", "judged", "longest"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} ({getattr(self, name)}) must be 1 or more")
        if not 0 <= self.r_drop < math.inf:
            raise ValueError(f"r_drop ({self.r_drop}) must be 0 (none) or more; try 5")
        if not 0 <= self.bpe_dropout <= 0.5:
            raise ValueError(f"bpe_dropout ({self.bpe_dropout}) must be from 0 to 0.5; try 0.1")
        check_start(self.start, self.tokenizer)


def preset(size: Preset = "tiny") -> Config:
    """Tiny is for tens of thousands of sentences and two cores; base and big are the paper's
    models (Vaswani et al. 2017, table 3), for millions of sentences and a GPU."""
    check_preset(size)
    if size == "tiny":
        return Config()
    base = size == "base"
    return Config(
        held_out=3000,
        vocabulary=32_000,
        model=TransformerShape()
        if base
        else TransformerShape(width=1024, heads=16, feed_forward=4096, dropout=0.3),
        training=TrainingConfig(
            steps=100_000 if base else 300_000,
            batch=50_000,
            lr=2.0,
            schedule="noam",
            warmup=4000,
            weight_decay=0.0,
            evaluate_every=2500,
            save_every=1000,
            average=5,
        ),
    )


def _on_device(config: Config, device: torch.device) -> Config:
    """On two cores, 20 minutes are too few to overfit, and Muon learns fastest. A GPU has time for
    more dropout, and stops when scores no longer rise."""
    if device.type != "cuda":
        return config
    training = replace(
        config.training,
        batch=16_384,
        optimizer="adamw",
        lr=1.5e-3,
        schedule="inverse_sqrt",
        warmup=300,
        evaluate_every=500,
        save_every=500,
        patience=8,
    )
    return replace(config, model=replace(config.model, dropout=0.2), training=training)


# The task


def build(
    config: Config, run: Path | None = None, progress: Progress | None = None
) -> "Translation":
    """Reads and tokenizes the files, splits off a validation set, and builds the model.

    A run that is resumed reads its tokenizer and validation set from its folder.
    """
    config = absolute(config, "source", "target", "pairs")
    config = absolute(config, "valid_source", "valid_target", "valid_pairs")
    config = absolute(config, "start", "tokenizer", "cache")
    _check_shape(config)
    text = _text(config, config.source, config.target, config.pairs)
    begun = run is not None and (run / "last").is_dir()
    saved = None if config.start is None else checkpoint.load(model_folder(config.start))
    if begun:
        assert run is not None
        tokenizers: tuple[AnyTokenizer, AnyTokenizer] | None = read_pair(run / "last")
    elif saved is not None:
        tokenizers = read_pair(saved.folder)
    elif config.tokenizer is not None:
        joint = Tokenizer.read(config.tokenizer)
        tokenizers = joint, joint
    else:
        tokenizers = None

    validation, split, held_out = _valid(config), None, list[Pair]()
    if validation is not None:
        held_out = _read_all(validation)
        validation.problems.check(config.on_bad, len(held_out))
    elif begun and run is not None and (run / HELD_OUT).is_file():
        held_out = _read_pairs(run / HELD_OUT)
    else:
        split = _Split(config.held_out)
    if tokenizers is None:
        # The pass that learns the tokenizer also splits off the validation set.
        tokenizers = _learn_tokenizers(config, text, split, progress)
    elif split is not None:
        for _ in _read(text, "sentences to hold out", split, progress):
            pass
    held_out = _fitting(
        held_out if split is None else split.pairs(), tokenizers, config.longest, validation
    )

    examples = store(
        text,
        tokenizers,
        rules=Rules(longest=config.longest, ratio=config.ratio),
        on_bad=config.on_bad,
        cache=config.cache,
        progress=None if progress is None else _shares(progress, "tokens"),
    )
    notes = examples.problems.lines()
    notes += describe_unwritable(tokenizers[1], [target for _, target in held_out])
    indices = np.arange(len(examples))
    if validation is not None:
        notes += validation.problems.lines()
        notes += describe_reuse(
            [*config.source, *config.pairs], [*config.valid_source, *config.valid_pairs]
        )
    else:
        indices = _others(examples, held_out, tokenizers[0])
    if not len(indices):
        raise ValueError(
            f"{', '.join(text.names)}: usable pairs ({len(examples)}) are too few to train and to "
            f"validate on{examples.problems.why}; add some, or name others with --valid-source and "
            "--valid-target, or --valid-pairs"
        )
    chosen = Chosen(examples, indices)
    return Translation(config, saved, tokenizers, chosen, held_out, notes, _tags(text))


def _check_shape(config: Config) -> None:
    """Raises if a new model does not suit the other settings."""
    shape = config.model
    if config.start is not None:
        return
    if shape.position == "learned" and shape.length <= config.longest:
        raise ValueError(
            f"learned positions ({shape.length}) must be more than longest ({config.longest}); "
            "raise the model's length"
        )
    check_share(shape, joint=config.words != "separate" or config.tokenizer is not None)


class Translation(Transduction):
    """Parallel text as `train.fit` wants it."""

    bfloat16_on_cpu = True

    def __init__(
        self,
        config: Config,
        saved: checkpoint.Saved | None,
        tokenizers: tuple[AnyTokenizer, AnyTokenizer],
        examples: Chosen,
        held_out: Sequence[Pair],
        notes: Sequence[str],
        tags: Sequence[str] = (),
    ):
        model = _model(config, saved, tokenizers)
        settings = _search(config, saved, tokenizers)
        counts: dict[str, Any] = {"examples": len(examples), "held_out": len(held_out)}
        if tags:
            counts["tags"] = list(tags)
        quality = Quality(config.bleu)
        self.signatures = quality.signatures
        super().__init__(
            model,
            tokenizers,
            examples,
            held_out,
            score="bleu",
            judge=quality,
            settings=settings,
            training=config.training,
            about=TASK.about(config, counts),
            judged=config.judged,
            notes=notes,
            r_drop=config.r_drop,
            bpe_dropout=config.bpe_dropout,
        )
        # Word alignments need a few pairs to choose their head. They must not come from files
        # that a config.json names: a folder would decide which files of a machine are read.
        self._kept = held_out[:SAMPLE] if _valid(config) else held_out

    def run_files(self) -> dict[str, bytes]:
        lines = [json.dumps(pair, ensure_ascii=False) + "\n" for pair in self._kept]
        return {HELD_OUT: "".join(lines).encode()} if lines else {}


def _tags(text: Text) -> list[str]:
    """All tags of the sources."""
    if not isinstance(text, Table) or not text.tags:
        return []
    return sorted({tag for source, _ in text.read() for tag in tags_of(source)[: len(text.tags)]})


def _model(
    config: Config, saved: checkpoint.Saved | None, tokenizers: tuple[AnyTokenizer, AnyTokenizer]
) -> Transformer:
    if saved is None:
        return build_transformer(config.model, tokenizers, config.training.seed)
    model = saved.model
    if isinstance(model, TextEncoder):
        with seeded(config.training.seed):
            model = Transformer.of(model, config.model)
    if not isinstance(model, Transformer) or not isinstance(model.config.source, TextSource):
        raise ValueError(
            f"start ({config.start}) holds a {type(model).__name__} that does not read text; "
            "name the folder of a translator, or of an encoder"
        )
    check_obeyed(config, preset, model.config, saved.task, "words", "vocabulary")
    return model


def _search(
    config: Config, saved: checkpoint.Saved | None, tokenizers: tuple[AnyTokenizer, AnyTokenizer]
) -> SearchSettings:
    mine = {"beams": config.beams, "length_penalty": config.length_penalty}
    if saved is None or not saved.task or isinstance(saved.model, TextEncoder):
        return SearchSettings.of(tokenizers[1], length=config.longest, **mine)
    settings = SearchSettings.read(saved.task, str(saved.folder / checkpoint.CONFIG))
    return replace(settings, beams=config.beams, length_penalty=config.length_penalty)


# Files


def _text(
    config: Config,
    source: Sequence[str],
    target: Sequence[str],
    pairs: Sequence[str],
    prefix: str = "--",
) -> Text:
    flags = f"{prefix}source", f"{prefix}target"
    if pairs and (source or target):
        raise ValueError(f"{flags[0]} and {prefix}pairs both name files; name one kind")
    if pairs:
        columns, separator, tags = config.columns, config.separator, config.tags
        return Table(*pairs, columns=columns, separator=separator, tags=tags, flag=f"{prefix}pairs")
    if config.tags:
        raise ValueError(f"tags are columns of tables: name {prefix}pairs, or leave out --tags")
    if not source or not target:
        absent = [flag for flag, files in zip(flags, (source, target)) if not files]
        raise ValueError(
            f"there is no {' and no '.join(absent)}: name two files, line by line, or one with "
            f"tabs as {prefix}pairs"
        )
    return Pairs(source, target, flags)


def _valid(config: Config) -> Text | None:
    """The files to validate on, if there are any."""
    files = config.valid_source, config.valid_target, config.valid_pairs
    return _text(config, *files, "--valid-") if any(files) else None


def _read_all(text: Text) -> list[Pair]:
    return [(source, target) for source, target in text.read()]


def _shares(progress: Progress, what: str) -> Any:
    return lambda done, total, kept: progress(what, done / max(1, total))


def _read(
    text: Text, what: str, split: "_Split | None", progress: Progress | None
) -> Iterator[Pair]:
    """Yields all pairs, adding them to `split`; `what` labels the progress."""
    report = None if progress is None else partial(progress, what)
    for source, target in text.read(report):
        if split is not None:
            split.add(source, target)
        yield source, target


def _fitting(
    pairs: Sequence[Pair], tokenizers: Sequence[AnyTokenizer], longest: int, files: Text | None
) -> list[Pair]:
    """Drops validation pairs that are too long, as in training; counts them in `files`, if any."""
    sides = [tokenizer.encode_packed(texts)[1] for tokenizer, texts in zip(tokenizers, zip(*pairs))]
    short = []
    for n, pair in enumerate(pairs):
        if max(lengths[n] for lengths in sides) <= longest:
            short.append(pair)
        elif files is not None:
            files.problems.add("long", f"{shown(pair[0])} to validate on")
    if not short:
        which = "that are held out" if files is None else f"of {', '.join(files.names)}"
        raise ValueError(f"all pairs {which} are longer than longest ({longest} tokens); raise it")
    return short


class _Split:
    """Selects the pairs whose sources have the smallest hashes, in one pass and little memory."""

    def __init__(self, most: int):
        self.most, self.count = most, 0
        self._heap: list[int] = []  # negated, so that the largest hash is on top
        self._kept: dict[int, list[Pair]] = {}

    def add(self, source: str, target: str) -> None:
        self.count += 1
        digest = hashlib.blake2b(source.encode(), digest_size=8).digest()
        mark = int.from_bytes(digest, "big")
        if mark in self._kept:
            self._kept[mark].append((source, target))
        elif len(self._heap) < self.most or mark < -self._heap[0]:
            heapq.heappush(self._heap, -mark)
            self._kept[mark] = [(source, target)]
            if len(self._heap) > self.most:
                del self._kept[-heapq.heappop(self._heap)]

    def pairs(self) -> list[Pair]:
        """One pair for each source, at most a tenth of all; training leaves out the others."""
        marks = sorted(self._kept)[: max(1, self.count // 10)]
        return [self._kept[mark][0] for mark in marks]


def _learn_tokenizers(
    config: Config, text: Text, split: _Split | None, progress: Progress | None
) -> tuple[AnyTokenizer, AnyTokenizer]:
    text.check_lines()

    def both() -> Iterator[str]:
        for pair in _read(text, "tokenizer", split, progress):
            yield from pair

    def side(n: int, split: _Split | None) -> Iterator[str]:
        return (pair[n] for pair in _read(text, "tokenizer", split, progress))

    match config.words:
        case "joint":
            joint = Tokenizer.bpe(both(), config.vocabulary)
        case "characters":
            joint = Tokenizer.characters(both())
        case "separate":
            source = Tokenizer.bpe(side(0, split), config.vocabulary)
            return source, Tokenizer.bpe(side(1, None), config.vocabulary)
    return joint, joint


def _others(examples: Store, held_out: Sequence[Pair], tokenizer: AnyTokenizer) -> np.ndarray:
    """Indices of the examples whose sources are not held out."""
    kind = examples.tokens(0).dtype
    ids = tokenizer.encode_batch([source for source, _ in held_out])
    marks = {np.array(row, kind).tobytes() for row in ids}
    lengths = np.isin(examples.lengths[:, 0], [len(row) for row in ids])
    out = [i for i in np.flatnonzero(lengths).tolist() if examples.tokens(i).tobytes() in marks]
    return np.delete(np.arange(len(examples)), out)


def _read_pairs(path: Path) -> list[Pair]:
    try:
        with path.open(encoding="utf-8") as lines:
            pairs = [(str(source), str(target)) for source, target in map(json.loads, lines)]
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is damaged ({reason(error)}); name other pairs to validate on"
        ) from error
    if not pairs:
        raise ValueError(f"{path} is empty; name other pairs to validate on")
    return pairs


# Quality


class Quality:
    """BLEU (Papineni et al. 2002) and chrF (Popović 2015), as sacrebleu computes them (Post 2018).

    Translations and references are compared in composed form (NFC), which tokenizers write. Scores
    with the same `signatures` are comparable; they are available after the first call.
    """

    def __init__(self, cut: Cut = "13a", lowercase: bool = False):
        from sacrebleu.metrics.bleu import BLEU
        from sacrebleu.metrics.chrf import CHRF

        # force=True silences sacrebleu's warning of text that looks tokenized.
        self.metrics = {
            "bleu": BLEU(tokenize=cut, lowercase=lowercase, force=True),
            "chrf": CHRF(lowercase=lowercase),
        }
        self.signatures: dict[str, str] = {}

    def __call__(self, written: Sequence[str], *references: Sequence[str]) -> dict[str, float]:
        scores = {}
        for name, metric in self.metrics.items():
            lists = [compose(texts) for texts in references]
            scores[name] = float(metric.corpus_score(compose(written), lists).score)
            self.signatures[name] = str(metric.get_signature())
        return scores


@dataclass(frozen=True)
class Translations(Evaluation):
    """Translations, their scores and their references."""

    translations: list[str] = field(default_factory=list)
    references: list[list[str]] = field(default_factory=list)
    """One list of reference translations, or several by different translators."""


def evaluate(
    folder: str | os.PathLike[str],
    *,
    source: Sequence[str] = (),
    target: Sequence[str] = (),
    pairs: Sequence[str] = (),
    columns: tuple[Column, Column] | None = None,
    separator: Separator | None = None,
    tags: Sequence[Column] | None = None,
    tag: Sequence[str] = (),
    beams: int | None = None,
    bleu: Cut | None = None,
    lowercase: bool = False,
    references: Sequence[str] = (),
    ensemble: Sequence[str] = (),
    ensemble_weights: Weights = (),
    precision: Precision = "fp32",
    device: str = "cpu",
    progress: Progress | None = None,
) -> Translations:
    """Scores a model's, or a run's, translations of these files, by beam search.

    Without files, a run is evaluated on all of its validation set. Columns, tags and separator of
    tables are by default the run's. `tag` tags sources without tags. If there are several
    combinations of tags, each has its own scores. `references` are files with more reference
    translations of each line. `ensemble` names other runs that translate together with this one,
    and `ensemble_weights` their weights, this one's first; by default they are equal.
    """
    translator = load_translators((folder, *ensemble), ensemble_weights, device, precision)
    config = recorded(Config, translator._about, str(folder))
    if source or target or pairs:
        base = config or Config()
        settings = replace(
            base,
            columns=columns or base.columns,
            separator=separator or base.separator,
            tags=() if source or target or tag else base.tags if tags is None else tuple(tags),
        )
        files: Text | None = _text(settings, source, target, pairs)
    else:
        files = None if config is None else _valid(config)
    text = _split_off(Path(folder)) if files is None else _read_all(files)
    problems = [] if files is None else files.problems.lines()
    if tag:
        check_tags(translator, tag)
        text = [(tagged(source, tag), target) for source, target in text]
    written = []
    for best in translator._translate_lines((source for source, _ in text), beams=beams):
        written.append(best[0].text)
        if progress:
            progress("translations", len(written) / len(text))
    quality = Quality(bleu or (config.bleu if config is not None else "13a"), lowercase)
    target_lists = [[target for _, target in text], *_references(references, len(text))]
    target_lists = [compose(targets) for targets in target_lists]
    scores = quality(written, *target_lists)
    scores |= _by_tag(text, written, translator.tags, quality)
    remarks = describe_unwritable(translator.tokenizer, target_lists[0])
    return Translations(
        scores,
        quality.signatures,
        problems,
        remarks=remarks,
        translations=written,
        references=target_lists,
    )


def _references(files: Sequence[str], count: int) -> list[list[str]]:
    """Reads more references, a line for each pair."""
    target_lists = []
    for name in files:
        with ExitStack() as stack:
            file = LineFile(Path(name), Reading(), stack)
            lines = [line.decode("utf-8", "replace").strip() for line in iter(file.line, None)]
        if len(lines) != count:
            raise ValueError(
                f"--references {name} has {len(lines):,} lines for {count:,} pairs to translate; "
                "each pair needs its line, and none may be left out"
            )
        target_lists.append(lines)
    return target_lists


def _by_tag(
    text: Sequence[Pair], written: Sequence[str], tags: Sequence[str], quality: "Quality"
) -> dict[str, float]:
    """The scores of each combination of tags, if there are several."""
    groups: dict[str, list[int]] = {}
    for n, (source, _) in enumerate(text):
        combination = " ".join(tag for tag in tags_of(source) if tag in tags)
        groups.setdefault(combination, []).append(n)
    if len(groups) < 2:
        return {}
    scores: dict[str, float] = {}
    for name, places in sorted(groups.items()):
        group_scores = quality([written[n] for n in places], [text[n][1] for n in places])
        scores |= {f"{score} ({name or 'no tag'})": value for score, value in group_scores.items()}
    return scores


def _split_off(run: Path) -> list[Pair]:
    """Reads the held-out pairs of a run, or the few that it keeps of its validation files."""
    path = run / HELD_OUT
    if run_config(run) is None or not path.is_file():
        raise ValueError(f"{run} does not say what to translate; name files: --source and --target")
    return _read_pairs(path)


def _translator(saved: checkpoint.Saved) -> Translator:
    return Translator._of(saved, partial(_split_off, saved.folder.parent))


TASK = TaskSpec(
    name="translate",
    summary="any parallel text: two files, or a table with two columns",
    config=Config,
    preset=preset,
    build=build,
    predictor=_translator,
    evaluate=evaluate,
    example='echo "…" | regard translate {run}',
    on_device=_on_device,
)
