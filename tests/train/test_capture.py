"""Batches filled up to a capacity, and steps captured in CUDA graphs."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.data.batch import Sizes
from regard.data.image import Augmentation
from regard.decode.engine.eager import EagerEngine
from regard.decode.engine.pick import pick
from regard.model.transformer import TransformerShape
from regard.task import classify, dates, encoder, label, language, read
from regard.task.read import Strip
from regard.train import capture, optimizer
from regard.train.config import TrainingConfig
from regard.train.display import Display
from regard.train.distributed import World
from regard.train.fit import fit
from regard.train.loader import batches
from regard.train.state import State
from regard.train.step import Numbers, Objective, Parts, Step
from regard.train.task import Fillable, Prepares
from tests.train.samples import Backwards, settings

SMALL = TransformerShape(
    width=32, heads=2, feed_forward=48, encoder_layers=1, decoder_layers=1, dropout=0.0
)
SHORT = TrainingConfig(steps=6, batch=200, warmup=2, tensorboard=False, device="cpu")


def _dates(**shape: Any) -> Any:
    model = replace(SMALL, **shape)
    small = replace(dates.preset(), languages=("en", "de"), model=model, training=SHORT)
    return dates.build(replace(small, examples=80))


def _language(tmp_path: Path, **more: Any) -> Any:
    text = tmp_path / "text.txt"
    lines = [" ".join(["word", "other", "more"][: 1 + n % 3] * (1 + n % 4)) for n in range(60)]
    text.write_text("\n".join(lines) + "\n")
    config = language.preset("tiny")
    shape = replace(config.model, width=32, heads=2, feed_forward=48, layers=1, dropout=0.0)
    config = replace(config, text=(str(text),), model=shape, training=SHORT, vocabulary=300, **more)
    return language.build(config)


def _label(tmp_path: Path, **more: Any) -> Any:
    table = tmp_path / "texts.tsv"
    rows = [f"{'good' if n % 2 else 'bad'}\t{'yes ' * (1 + n % 5)}{n}" for n in range(60)]
    table.write_text("\n".join(rows) + "\n")
    config = label.preset("tiny")
    shape = replace(config.model, width=32, heads=2, feed_forward=48, layers=1, dropout=0.0, **more)
    return label.build(
        replace(config, texts=(str(table),), model=shape, training=SHORT, vocabulary=300)
    )


def _encoder(tmp_path: Path) -> Any:
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"{'some words ' * (1 + n % 5)}{n}" for n in range(80)) + "\n")
    config = encoder.preset("tiny")
    shape = replace(config.model, width=32, heads=2, feed_forward=48, layers=1, dropout=0.0)
    return encoder.build(
        replace(config, text=(str(text),), model=shape, training=SHORT, vocabulary=300)
    )


def _read(tmp_path: Path) -> Any:
    config = read.preset("tiny")
    return read.build(
        replace(
            config,
            strip=Strip(easy=0),
            model=replace(SMALL, norm="pre"),
            training=replace(SHORT, batch=5),
        )
    )


def _classify(tmp_path: Path) -> Any:
    config = classify.preset("tiny")
    how = Augmentation(flip=True, crop=(0.6, 1.0), policy="rand", mixup=True, cutmix=True)
    return classify.build(replace(config, augmentation=how, training=replace(SHORT, batch=7)))


TASKS: dict[str, Callable[[Path], Any]] = {
    "dates": lambda path: _dates(),
    "dates, convolution": lambda path: _dates(mixer="convolution"),
    "dates, window": lambda path: _dates(window=3),
    "language": lambda path: _language(path, examples="lines"),
    "language, joined": lambda path: _language(path, context=16),
    "label": _label,
    "label, lstm": lambda path: _label(path, mixer="lstm"),
    "encoder": _encoder,
    "read": _read,
    "classify": _classify,
}


def _world(device: str = "cpu") -> World:
    return World(rank=0, size=1, local=0, device=torch.device(device))


def _gradients(task: Any, batch: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    task.model.zero_grad()
    loss, count = task.loss(batch)
    loss.backward()
    grads = {n: p.grad.clone() for n, p in task.model.named_parameters() if p.grad is not None}
    return loss.detach(), count, grads


@pytest.mark.parametrize("name", TASKS)
def test_what_fills_a_batch_up_counts_nothing(name: str, tmp_path: Path) -> None:
    task = TASKS[name](tmp_path)
    assert isinstance(task, Fillable)
    task.model.double().train()
    plan = task.plan(0)
    size = task.capacity(plan)
    batch = task.batch(min(plan, key=len), 1)
    filled = batch.fill(size)
    torch.manual_seed(5)
    prepared = task.prepare(batch) if isinstance(task, Prepares) else batch
    if isinstance(task, Prepares):
        torch.manual_seed(5)
        filled = task.prepare(filled).fill(size)
        if name == "classify":
            prepared = replace(prepared, inputs=prepared.inputs.double())
            filled = replace(filled, inputs=filled.inputs.double())
        else:
            prepared = replace(prepared, source=prepared.source.double())
            # Augmentation draws for each image; the real ones are those of the batch.
            source = torch.cat([prepared.source, filled.source[len(prepared.source) :].double()])
            filled = replace(filled, source=source)
    assert filled is not None
    assert sum(t.numel() for t in filled.tensors()) > sum(t.numel() for t in prepared.tensors())
    loss, count, grads = _gradients(task, prepared)
    loss_2, count_2, grads_2 = _gradients(task, filled)
    assert count == count_2
    torch.testing.assert_close(loss_2, loss, rtol=1e-10, atol=0)
    for key, grad in grads.items():
        torch.testing.assert_close(grads_2[key], grad, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", TASKS)
def test_all_batches_of_a_run_have_one_size(name: str, tmp_path: Path) -> None:
    task = TASKS[name](tmp_path)
    config = replace(task.config.training if hasattr(task, "config") else SHORT, epochs=3, steps=40)
    size = capture.capacity(task, config, _world())
    shapes, whole = set(), 0
    for step in batches(task, config, _world(), State(), size):
        (part,) = step.parts
        if not part.filled:
            continue
        whole += 1
        batch = task.prepare(part.batch) if isinstance(task, Prepares) else part.batch
        filled = batch.fill(size)
        shapes.add(tuple(tuple(tensor.shape) for tensor in filled.tensors()))
        assert filled.fill(size) is filled
    assert len(shapes) == 1
    assert whole >= 3


def test_windows_of_joined_text_are_rows(tmp_path: Path) -> None:
    task = TASKS["language, joined"](tmp_path)
    size = task.capacity(task.plan(0))
    assert size.even
    assert task.batch(task.plan(0)[0], 1).fill(size).inputs.shape == (size.sequences, 16)
    assert not TASKS["language"](tmp_path).capacity(task.plan(0)).even


def test_a_batch_beyond_the_capacity_is_left_as_it_is() -> None:
    task = _dates()
    plan = task.plan(0)
    smallest = min(plan, key=lambda some: task.examples.lengths[some].sum())
    tight = task.capacity([smallest[:2]])
    assert task.batch(max(plan, key=len), 1).fill(tight) is None


def test_why_steps_are_not_captured() -> None:
    task = _dates()
    refusal = capture.refusal
    assert refusal(task, SHORT, _world()) == "not on a CPU"
    assert refusal(task, SHORT, _world("cuda")) is None
    assert refusal(task, replace(SHORT, capture="no"), _world("cuda")) == "capture no"
    assert refusal(Backwards(), SHORT, _world("cuda")) == "the task's batches have no capacity"
    several = World(rank=0, size=2, local=0, device=torch.device("cuda"))
    assert refusal(task, SHORT, several) == "several processes"
    handle = task.model.decoder.blocks[0].register_full_backward_hook(lambda *_: None)
    assert refusal(task, SHORT, _world("cuda")) == "a module has a hook, or a forward of its own"
    handle.remove()
    task.model.encoder.checkpointing = True
    assert refusal(task, SHORT, _world("cuda")) == "gradient checkpointing"


# On a GPU


def _steps(
    step: Step, task: Any, size: Sizes, count: int, accumulate: int = 1
) -> list[list[float]]:
    """Rows of figures of some steps; batches are filled for captured steps and others alike."""
    config = replace(step.parts.config, steps=count, accumulate=accumulate)
    rows = []
    with step.running():
        for n, batch in enumerate(batches(task, config, step.parts.world, State(), size)):
            step.begin(Numbers(1e-3, 0.1, 0.0, 0.0, 0.0))
            for m, part in enumerate(batch.parts):
                torch.manual_seed(100 * n + m)
                step.backward(part, m, m == accumulate - 1)
            rows.append(step.update())
    return [row.tolist() for row in rows]


def _parts(task: Any, dtype: torch.dtype = torch.bfloat16, config: TrainingConfig = SHORT) -> Parts:
    model = task.model.to("cuda").train()
    parameters = dict(model.named_parameters())
    ema = optimizer.MovingAverage(parameters, 0.9)
    scaler = torch.amp.GradScaler("cuda", 1.0, enabled=dtype is torch.float16)
    made, world = optimizer.make(model, config), _world("cuda")
    return Parts(task, Objective(task), parameters, made, scaler, ema, config, world, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    ("dtype", "kind"),
    [(torch.bfloat16, "adamw"), (torch.float16, "adamw"), (torch.bfloat16, "muon")],
)
def test_captured_steps_are_the_same_to_the_last_bit(
    dtype: torch.dtype, kind: str, accumulate: int
) -> None:
    shape = {"width": 64, "dropout": 0.1, "norm": "pre", "position": "rotary"}
    found = []
    for captured in (False, True):
        task = _dates(**shape)
        config = replace(SHORT, accumulate=accumulate, optimizer=kind)
        parts = _parts(task, dtype, config)
        size = capture.capacity(task, config, _world("cuda"))
        said: list[str] = []
        step = capture.CapturedStep(parts, size, said.append) if captured else Step(parts)
        rows = _steps(step, task, size, 12, accumulate)
        assert not said
        means = {name: value.clone() for name, value in parts.ema.means.items()}  # type: ignore[union-attr]
        found.append((rows, parts.parameters, means))
        if isinstance(step, capture.CapturedStep):
            assert set(step._graphs) == {"first", "update"} | (
                {"more"} if accumulate > 1 else set()
            )
    (rows, parameters, means), (rows_2, parameters_2, means_2) = found
    assert rows == rows_2
    for name, value in parameters.items():
        assert torch.equal(parameters_2[name], value)
        assert torch.equal(means_2[name], means[name])


@pytest.mark.gpu
def test_an_engine_sees_updates_that_were_replayed() -> None:
    task = _dates(width=64, norm="pre", position="rotary")
    parts = _parts(task)
    size = capture.capacity(task, SHORT, _world("cuda"))
    step = capture.CapturedStep(parts, size, pytest.fail)
    source = torch.tensor([[5, 6, 7]], device="cuda")
    for _ in range(2):
        _steps(step, task, size, 12)
        task.model.eval()
        sessions = [pick(task.model), EagerEngine()]
        first, second = (one.open(task.model, source, None, length=8) for one in sessions)
        assert type(first) is not type(second)
        for token in ([1], [9]):
            have, want = (one.step(torch.tensor(token, device="cuda")) for one in (first, second))
            torch.testing.assert_close(have, want, rtol=1e-3, atol=1e-3)
        task.model.train()


@pytest.mark.gpu
def test_a_hook_registered_after_the_capture_fires() -> None:
    task = _dates(width=64)
    size = capture.capacity(task, SHORT, _world("cuda"))
    step = capture.CapturedStep(_parts(task), size, pytest.fail)
    _steps(step, task, size, 6)
    assert step._graphs
    fired: list[int] = []
    handle = task.model.encoder.register_forward_hook(lambda *_: fired.append(1))
    _steps(step, task, size, 2)
    handle.remove()
    assert len(fired) == 2
    _steps(step, task, size, 2)
    assert len(fired) == 2


@pytest.mark.gpu
def test_a_step_that_cannot_be_captured_goes_on_without() -> None:
    found = []
    for waits in (False, True):
        task = _dates(width=64, dropout=0.1)
        parts = _parts(task)
        size = capture.capacity(task, SHORT, _world("cuda"))
        real = task.loss

        def loss(batch: Any, real: Any = real, waits: bool = waits) -> tuple[Tensor, Tensor]:
            made, count = real(batch)
            if waits:
                made.item()
            return made, count

        parts.objective._loss = loss  # type: ignore[assignment]
        said: list[str] = []
        step = capture.CapturedStep(parts, size, said.append) if waits else Step(parts)
        found.append(_steps(step, task, size, 9))
    assert found[0] == found[1]
    assert said == [
        "steps are not captured: CUDA error: operation not permitted when stream is capturing"
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("name", TASKS)
def test_runs_are_captured_and_resume(name: str, tmp_path: Path) -> None:
    said = _Said()
    config = replace(settings(), device="cuda", steps=12, log_every=2)
    config = replace(config, batch=200 if name not in ("read", "classify") else 7)

    def trained(folder: str, steps: int, **more: Any) -> dict[str, Tensor]:
        task = TASKS[name](tmp_path)
        fit(task, replace(config, steps=steps, **more), tmp_path / folder, shown=said)
        return {key: value.clone() for key, value in task.model.state_dict().items()}

    whole = trained("whole", 12)
    assert "captured in CUDA graphs" in said.words[0]
    assert not any("not captured" in words for words in said.words)
    trained("parts", 6)
    again = trained("parts", 12)
    for key, value in whole.items():
        torch.testing.assert_close(again[key], value, rtol=1e-2, atol=1e-3)
    plain = trained("plain", 12, capture="no", compile="no")
    for key, value in whole.items():
        torch.testing.assert_close(plain[key], value, rtol=0.2, atol=2e-2)


class _Said(Display):
    def __init__(self) -> None:
        self.words: list[str] = []

    def say(self, words: str) -> None:
        self.words.append(words)
