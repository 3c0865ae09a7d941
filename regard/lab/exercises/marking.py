"""Marking: an answer compared with the right one, and with the result of each common mistake.

A message says what is wrong and where. Nothing is raised, so that a notebook continues.
"""

import linecache
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

CLOSE = 1e-8
"""The tolerance; numbers are in float64."""


@dataclass(frozen=True)
class Case:
    """One call of what a learner wrote."""

    name: str
    """For the message: under a causal mask."""
    run: Callable[[], object]
    right: Tensor
    mistakes: Sequence[tuple[Tensor, str]] = ()
    """The result of each common mistake, and the message for it."""


def mark(part: str, cases: Sequence[Case]) -> None:
    """Prints one line: that all is right, or what is wrong with the first case that is not."""
    for case in cases:
        complaint = judge(case)
        if complaint == BLANK:
            print(f"… {part}: {BLANK}")
            return
        if complaint is not None:
            print(f"✗ {part}, {case.name}: {complaint}")
            return
    print(f"✓ {part}: {', '.join(case.name for case in cases)}")


BLANK = "still blank"


def judge(case: Case) -> str | None:
    """What is wrong with an answer; None where nothing is."""
    try:
        with torch.no_grad():
            answer = case.run()
    except NotImplementedError:
        return BLANK
    except Exception as error:
        return f"{_place(error)}{type(error).__name__}: {' '.join(str(error).split())}"
    if answer is None:
        return "it returns nothing; end it with `return`"
    if not isinstance(answer, Tensor):
        return f"it returns a {type(answer).__name__}, but should return a tensor"
    if _same(answer, case.right):
        return None
    for wrong, message in case.mistakes:
        if _same(answer, wrong):
            return message
    return _difference(answer, case.right)


Module = TypeVar("Module", bound=nn.Module)


def drawn(module: Module) -> Module:
    """A module in float64 whose parameters are all random, biases too."""
    generator = torch.Generator().manual_seed(11)
    for parameter in module.double().parameters():
        nn.init.normal_(parameter, std=0.4, generator=generator)
    return module.eval()


def filled(
    part: str, make: Callable[[], nn.Module], weights: Mapping[str, Tensor]
) -> nn.Module | None:
    """The learner's module with these weights; None, and a printed reason, where that fails."""
    try:
        module = make().double().eval()
        module.load_state_dict(weights)
    except NotImplementedError:
        print(f"… {part}: {BLANK}")
    except Exception as error:
        message = " ".join(str(error).split())
        print(f"✗ {part}: {_place(error)}{message}; leave __init__ as it was given")
    else:
        return module
    return None


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(
        a.to(b.dtype), b, rtol=CLOSE, atol=CLOSE, equal_nan=True
    )


def _difference(answer: Tensor, right: Tensor) -> str:
    if answer.shape != right.shape:
        return f"its shape is {tuple(answer.shape)}, but should be {tuple(right.shape)}"
    if not bool(answer.isfinite().all()):
        place = (~answer.isfinite()).nonzero()[0].tolist()
        return f"{float(answer[tuple(place)])} at {place}; where does the first one come from?"
    unlike = ~torch.isclose(answer.to(right.dtype), right, rtol=CLOSE, atol=CLOSE)
    place = unlike.nonzero()[0].tolist()
    return (
        f"{int(unlike.sum())} of {unlike.numel()} numbers are wrong, the first at {place}: "
        f"{float(answer[tuple(place)]):.4f} instead of {float(right[tuple(place)]):.4f}"
    )


def _place(error: Exception) -> str:
    """The line of the learner's code that led to an error, as far as it is known."""
    here, torch_home = Path(__file__).parent.parent.parent, Path(torch.__file__).parent
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not Path(frame.filename).is_relative_to(here)
        and not Path(frame.filename).is_relative_to(torch_home)
    ]
    if not frames or frames[-1].lineno is None:
        return "it stops with "
    line = linecache.getline(frames[-1].filename, frames[-1].lineno).strip()
    return f"it stops in line {frames[-1].lineno}" + (f", `{line}`, with " if line else ", with ")
