"""The promises, each with its measurement, tolerance and remedy."""

import copy
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard import checkpoint, interop
from regard.attention.fusing import fuses
from regard.checks import compute, hooks, training
from regard.checks.compute import Rows
from regard.checks.finding import Measured, Property, SkipError
from regard.checks.subject import Subject
from regard.decode.engine.eager import EagerEngine
from regard.decode.engine.int8.linear import int8
from regard.decode.engine.pick import open_session, pick
from regard.decode.engine.session import Session
from regard.decode.search.beam import beam
from regard.decode.search.greedy import greedy
from regard.decode.search.hypothesis import Hypothesis
from regard.interop.refusal import other_mixing
from regard.interop.verify import DifferenceError
from regard.look.effect import attentions_of
from regard.look.record import record
from regard.machine.processes import one_line
from regard.model.language import LanguageModel
from regard.model.transformer import TextSource, Transformer

ROUNDING = 1e-4
"""Of float32 in another order, as a share of the largest logit."""

NARROW = 0.1
"""Nats by which narrower numbers may change the score of the likeliest token, on average."""

EXCESS = 0.02
"""Of a gradient's norm: what fused kernels may add to the error of mixed precision."""

STEPS = 12
"""Tokens that are written."""


# Ways to the same logits


def fused_formula(subject: Subject) -> Measured:
    if parts := checkpoint.custom_parts(subject.model):
        raise SkipError(f"no formula is known: {checkpoint.listed_parts(parts)}")
    if reasons := other_mixing(subject.model.config):
        raise SkipError(f"no formula is known: {reasons[0].reason}")
    model = copy.deepcopy(subject.model).cpu()
    return _logits(subject, compute.formula(model, subject.examples))


def packed_padded(subject: Subject) -> Measured:
    return _logits(subject, compute.packed(subject.model, subject.examples))


def cached_uncached(subject: Subject) -> Measured:
    return _logits(subject, compute.cached(subject.model, subject.examples))


def batch_alone(subject: Subject) -> Measured:
    return _logits(subject, compute.alone(subject.model, subject.examples))


def recorded_unrecorded(subject: Subject) -> Measured:
    if not attentions_of(subject.model):
        raise SkipError("it has no attention to record")
    with ExitStack() as stack:
        try:
            stack.enter_context(record(subject.model))
        except ValueError as error:  # a custom core without weights
            raise SkipError(one_line(error)) from error
        rows = compute.padded(subject.model, subject.examples)
    return _logits(subject, rows)


def compiled_eager(subject: Subject) -> Measured:
    """On a CPU through the compiler's front alone, which traces and decomposes, without C++."""
    cuda = compute.place(subject.model).type == "cuda"
    compiled = torch.compile(
        compute.padded, backend="inductor" if cuda else "aot_eager", dynamic=False
    )
    try:
        found = compiled(subject.model, subject.examples)
    finally:
        torch.compiler.reset()
    return _logits(subject, found)


def fused_plain(subject: Subject) -> Measured:
    """The error of fused gradients against float32, beyond that of plain mixed precision."""
    device = compute.place(subject.model).type
    with torch.enable_grad(), torch.autocast(device, torch.bfloat16):
        if not fuses(torch.empty(0, device=device)):
            raise SkipError("fused kernels run on a CUDA device alone")
    model = copy.deepcopy(subject.model)

    def gradients(half: bool) -> Tensor:
        hooks.gradient_step(compute.padded, model, subject.examples, half)
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    fused = gradients(True)
    with hooks.plain():
        plain, exact = gradients(True), gradients(False)
    excess = (fused - exact).norm() - (plain - exact).norm()
    share = float(excess.clamp(min=0) / exact.norm())
    return Measured(share, f"error of {len(exact):,} gradients beyond autocast's, relative norm")


def hooks_fire(subject: Subject) -> Measured:
    return hooks.missing(subject, _int8)


def captured_eager(subject: Subject) -> Measured:
    if compute.place(subject.model).type != "cuda":
        raise SkipError("steps are captured on a CUDA device alone")
    model = _writer(subject)
    engine = pick(model)
    if engine.name != "cuda":
        raise SkipError(engine.reason)
    return _engines(subject, model, engine)


def _logits(subject: Subject, found: Rows) -> Measured:
    ours = torch.cat(subject.logits).double().cpu()
    theirs = torch.cat(list(found)).double().cpu()
    share = (ours - theirs).abs().max() / max(1.0, float(ours.abs().max()))
    return Measured(
        float(share), f"logits at {subject.positions} positions, as a share of the largest"
    )


# Search and engines


def beams_greedy(subject: Subject) -> Measured:
    model = _writer(subject)
    rules: dict[str, Any] = {"end": _tokens(subject)["end"], "max_length": STEPS}
    with _session(subject, model) as session:
        one = greedy(session, _prompts(subject), **rules)
    with _session(subject, model) as session:
        two = [best[0] for best in beam(session, _prompts(subject), width=1, **rules)]
    return _sentences(one, two)


def engines_eager(subject: Subject) -> Measured:
    """On a CPU the other engine is the 8-bit one, beside its own 8-bit modules."""
    model = _writer(subject)
    if compute.place(model).type == "cuda":
        raise SkipError("the engine here is the captured one, which has its own line")
    quantized = _int8(model)
    engine = pick(quantized)
    if engine.name != "int8":
        raise SkipError(engine.reason)
    return _engines(subject, quantized, engine)


def _engines(subject: Subject, model: Any, engine: Any) -> Measured:
    """Logits of the same tokens, step by step, relative to their norm."""
    worst, count = 0.0, 0
    sessions = [_session(subject, model, which) for which in (engine, EagerEngine())]
    with sessions[0] as one, sessions[1] as two:
        if engine.name == EagerEngine.name:
            raise SkipError(engine.reason)
        last, _ = (session.begin(_prompts(subject)) for session in (one, two))
        for _ in range(STEPS):
            have, want = one.step(last), two.step(last)
            norms = (have - want).norm(dim=1) / want.norm(dim=1)
            worst, count = max(worst, float(norms.max())), count + len(norms)
            last = want.argmax(-1)
    return Measured(worst, f"logits at {count} steps of the {engine.name} engine, relative norm")


def _writer(subject: Subject) -> Any:
    if not isinstance(subject.model, Transformer | LanguageModel):
        raise SkipError("it writes no text")
    return subject.model


def _session(subject: Subject, model: Any, engine: Any = None) -> Session:
    settings: dict[str, Any] = {"rows": None, "beams": 1, "length": STEPS + _longest(subject)}
    if isinstance(model, LanguageModel):
        source, lengths, settings["rows"] = None, None, len(subject.examples)
    else:
        source, lengths = compute.sources(subject.examples)
    if engine is None:
        return open_session(model, source, lengths, **settings)
    session: Session = engine.open(model, source, lengths, **settings)
    return session


def _longest(subject: Subject) -> int:
    return max(map(len, _prompts(subject)))


def _prompts(subject: Subject) -> list[list[int]]:
    """BOS; a language model goes on with the first tokens of each text."""
    first = 4 if isinstance(subject.model, LanguageModel) else 1
    targets = [example.target for example in subject.examples if example.target is not None]
    return [target[:first].tolist() for target in targets]


def _tokens(subject: Subject) -> dict[str, int]:
    return {name: int(subject.task.get(name, n)) for n, name in enumerate(("pad", "start", "end"))}


def _sentences(one: Sequence[Hypothesis], two: Sequence[Hypothesis]) -> Measured:
    other = sum(a.tokens != b.tokens for a, b in zip(one, two))
    return Measured(other / len(one), f"the share of {len(one)} sentences that differ")


# Narrower numbers


def bfloat16_float32(subject: Subject) -> Measured:
    model = copy.deepcopy(subject.model).bfloat16()
    examples = [
        compute.Example(
            one.source.bfloat16()
            if one.source is not None and one.source.is_floating_point()
            else one.source,
            one.target,
        )
        for one in subject.examples
    ]
    return _agreement(subject, compute.padded(model, examples))


def int8_float32(subject: Subject) -> Measured:
    if compute.place(subject.model).type != "cpu":
        raise SkipError("8-bit weights are for a CPU")
    return _agreement(subject, compute.padded(_int8(_writer(subject)), subject.examples))


def _int8(model: Any) -> Any:
    with warnings.catch_warnings(
        action="ignore"
    ):  # it is slow without a compiler, but no less true
        return int8(copy.deepcopy(model).eval())


def _agreement(subject: Subject, found: Rows) -> Measured:
    """The change of the likeliest token's score; near ties may end otherwise."""
    ours, theirs = torch.cat(subject.logits).cpu(), torch.cat(list(found)).float().cpu()
    same = (ours.argmax(-1) == theirs.argmax(-1)).double().mean()
    best = ours.argmax(-1, keepdim=True)
    change = (ours.log_softmax(-1) - theirs.log_softmax(-1)).gather(-1, best).abs().mean()
    return Measured(
        float(change),
        f"mean change of log p of the likeliest, which is the same at {float(same):.1%} of "
        f"{subject.positions} positions",
    )


# Files


def exported_native(subject: Subject) -> Measured:
    """In CTranslate2 where it has such a model and is installed, else as a torch.export program."""
    model, reasons = subject.model, []
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("ctranslate2", "torch-export"):
            if kind == "ctranslate2" and not _writes_text(model):
                continue
            try:
                verified = interop.write(
                    model,
                    Path(folder) / kind,
                    kind,
                    files=subject.files,
                    task=subject.task or None,
                )
            except DifferenceError as error:
                if checkpoint.custom_parts(model):  # the format has no place for them
                    reasons.append(str(error))
                    continue
                verified = error.verified
            except ValueError as error:
                reasons.append(str(error))
                continue
            share = verified.difference / max(1.0, verified.largest)
            return Measured(
                share, f"{verified.logits:,} logits in {verified.engine}, as a share of the largest"
            )
    raise SkipError(reasons[-1])


def _writes_text(model: nn.Module) -> bool:
    if isinstance(model, Transformer):
        return isinstance(model.config.source, TextSource)
    return isinstance(model, LanguageModel)


def saved_original(subject: Subject) -> Measured:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        checkpoint.save(path, subject.model, files=subject.files, task=subject.task or None)
        model = copy.deepcopy(subject.model) if checkpoint.custom_parts(subject.model) else None
        device = compute.place(subject.model)
        loaded = checkpoint.load(path, model=model, device=device).model
    return same_tensors(state(subject.model), state(loaded), "tensors of weights")


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}


def _wide(part: Tensor) -> Tensor:
    """A tensor in float64, or complex128."""
    return part.to(torch.complex128 if part.is_complex() else torch.float64)


def same_tensors(one: dict[str, Tensor], two: dict[str, Tensor], what: str) -> Measured:
    if one.keys() != two.keys():
        return Measured(float("inf"), f"{what}: {', '.join(sorted(one.keys() ^ two.keys()))}")
    differences = [
        (_wide(one[name]) - _wide(two[name])).abs().max() for name in one if one[name].numel()
    ]
    return Measured(float(max(differences, default=0.0)), f"{len(one)} {what}, to the bit")


# Training and evaluation


def resumed_uninterrupted(subject: Subject) -> Measured:
    if compute.place(subject.model).type != "cpu":
        raise SkipError("on a GPU sums are added in any order; it is bit-equal on a CPU")
    with torch.enable_grad():
        whole, resumed = training.twice(subject.model, subject.examples)
    return same_tensors(whole, resumed, "tensors of weights")


def evaluation_changes_nothing(subject: Subject) -> Measured:
    before, chance, mode = state(subject.model), torch.get_rng_state(), subject.model.training
    compute.padded(subject.model, subject.examples)
    if isinstance(subject.model, Transformer | LanguageModel):
        with _session(subject, subject.model) as session:
            greedy(session, _prompts(subject), end=_tokens(subject)["end"], max_length=STEPS)
    measured = same_tensors(before, state(subject.model), "tensors of weights")
    if subject.model.training != mode or not torch.equal(chance, torch.get_rng_state()):
        return Measured(float("inf"), "training mode, or the state of random numbers")
    return measured


REPORT = "please report it, with the model's config.json"

PROPERTIES = (
    Property("fused = formula", ROUNDING, REPORT, fused_formula),
    Property("packed = padded", ROUNDING, REPORT, packed_padded),
    Property("cached = uncached", ROUNDING, REPORT, cached_uncached),
    Property("beam 1 = greedy", 0.0, REPORT, beams_greedy),
    Property("batch = one by one", ROUNDING, REPORT, batch_alone),
    # Where the two round a number to neighbouring 8-bit values, up to 0.056 was measured, on
    # random models with weights of twice the initial size; 0.033 on a trained one.
    Property("engine = eager", 0.08, "use --precision fp32, and report it", engines_eager),
    Property("compiled = eager", ROUNDING, "train with --training.compile no", compiled_eager),
    Property("fused steps = plain", EXCESS, REPORT, fused_plain),
    Property("captured = eager", ROUNDING, "train with --training.capture no", captured_eager),
    Property("bf16 ≈ fp32", NARROW, "use --precision fp32 for this model", bfloat16_float32),
    Property("int8 ≈ fp32", NARROW, "use --precision fp32 for this model", int8_float32),
    Property("recorded = unrecorded", ROUNDING, REPORT, recorded_unrecorded),
    Property(
        "exported = native", ROUNDING, "do not use the export, and report it", exported_native
    ),
    Property("loaded = saved", 0.0, "keep the original folder, and report it", saved_original),
    Property("resumed = uninterrupted", 0.0, REPORT, resumed_uninterrupted),
    Property("hooks fire", 0.0, "register the hook for all modules, and report it", hooks_fire),
    Property("evaluation changes nothing", 0.0, REPORT, evaluation_changes_nothing),
)
"""The contract."""
