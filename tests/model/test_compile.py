"""torch.compile: one graph without breaks, one kernel for every length, the same numbers.

In a process of its own, because it cannot see through the checks of annotations.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent

COMPILED = """
import json, sys, torch
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from regard import PackedLengths
from regard.model.stack import Stack
from tests.model import samples
from tests.model.samples import SOURCES, frames, images, tokens

torch.manual_seed(0)
torch.set_num_threads(1)
LENGTHS = (7, 11, 13, 5)
B = 3

# One block of each kind: more would only take more time.
def transformer(*position, dtype=torch.float32, **options):
    options = {"encoder_layers": 1, "decoder_layers": 1} | options
    return samples.transformer(*position, dtype=dtype, **options)

def language(**options):
    return samples.language(dtype=torch.float32, layers=1, **options)

def vision(**options):
    return samples.vision(torch.float32, **options)

def padded(n):
    return tokens(B, n), tokens(B, n + 2), torch.tensor([n, n - 2, 1])

def run_padded(model):
    return lambda source, target, lengths: model(
        source, target, source_lengths=lengths, target_lengths=lengths + 2
    )

def run_packed(model):
    return lambda source, target, a, b: model(source, target, source_lengths=a, target_lengths=b)

def packed(n):
    return tokens(1, n), tokens(1, n + 1), PackedLengths([3, n - 3]), PackedLengths([1, n])

MODELS = {
    "padded": lambda: run_padded(transformer("rotary", norm="pre", key_heads=2)),
    "post": lambda: run_padded(transformer("sinusoidal")),
    "bias": lambda: run_padded(transformer("linear-bias")),
    "learned": lambda: run_padded(transformer("learned")),
    "concatenated": lambda: run_padded(transformer("concatenated")),
    "packed": lambda: run_packed(transformer("rotary", norm="pre", key_heads=2)),
    "packed post": lambda: run_packed(transformer("sinusoidal")),
    "language": lambda: language(),
    "language packed": lambda: (lambda m: lambda ids, a: m(ids, lengths=a))(
        language()
    ),
    "vision": lambda: vision(),
    "vision mean": lambda: vision(pool="mean"),
    "audio": lambda: (lambda m: lambda x, y, n: m(x, y, source_lengths=n))(
        transformer(source=SOURCES["audio"])
    ),
    "image": lambda: (lambda m: lambda x, y, n: m(x, y, target_lengths=n))(
        transformer(source=SOURCES["image"])
    ),
}
INPUTS = {
    "packed": packed,
    "packed post": packed,
    "language": lambda n: (tokens(B, n),),
    "language packed": lambda n: (tokens(1, n), PackedLengths([3, n - 3])),
    "vision": lambda n: (images(n, torch.float32),),
    "vision mean": lambda n: (images(n, torch.float32),),
    "audio": lambda n: (frames(B, n, torch.float32), tokens(B, 9), torch.tensor([n, 1, 2])),
    "image": lambda n: (images(2, torch.float32), tokens(1, n), PackedLengths([3, n - 3])),
}

def lengths(name):
    "How often it is compiled for five lengths (of a batch, for images)."
    model, counter = MODELS[name](), CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    with torch.no_grad():
        for n in LENGTHS:
            given = INPUTS.get(name, padded)(n)
            torch.testing.assert_close(compiled(*given), model(*given), atol=1e-5, rtol=1e-5)
    return counter.frame_count

def gradients(name, checkpointing=False):
    "The same gradients, checkpointed or not; how often it is compiled for three lengths."
    if name == "vision":
        model, inputs = vision(), lambda n: (images(n, torch.float32),)
    elif name == "language":
        model, inputs = language(), lambda n: (tokens(B, n),)
    else:
        model, inputs = transformer(), lambda n: (tokens(B, n), tokens(B, n + 2))
    counter = CompileCounterWithBackend("aot_eager")
    own, results = list(model.parameters()), []
    for n in LENGTHS[:3]:
        given, results = inputs(n), []
        for on, run in (
            (False, model), (checkpointing, torch.compile(model, backend=counter, fullgraph=True))
        ):
            for module in model.modules():
                if isinstance(module, Stack):
                    module.checkpointing = on
            results.append(torch.autograd.grad(run(*given).square().mean(), own))
        torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)
    return counter.frame_count

def steps(position, capacity=13, backend="eager"):
    "Decoding from a cache with a capacity: how often a step is compiled."
    model = transformer(position, key_heads=2)
    source, target = tokens(B, 7), tokens(B, 11)
    counter, cache = CompileCounterWithBackend(backend), model.cache(capacity)
    step = torch.compile(
        lambda ids, memory, cache: model.decode(ids, memory, cache=cache),
        backend=counter, fullgraph=True,
    )
    with torch.no_grad():
        memory = model.encode(source)
        have = [step(new, memory, cache) for new in target.split(1, 1)]
        torch.testing.assert_close(
            torch.cat(have, 1), model(source, target), atol=1e-5, rtol=1e-5
        )
    return counter.frame_count

def inductor():
    "Kernels, made for any length."
    model = run_packed(transformer("rotary"))
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        for n in (7, 11, 13):
            given = packed(n)
            torch.testing.assert_close(compiled(*given), model(*given), atol=1e-5, rtol=1e-5)
    return 1

for line in sys.argv[1:]:
    torch.compiler.reset()
    try:
        print(json.dumps([line, eval(line)]), flush=True)
    except Exception as error:
        print(json.dumps([line, repr(error)[-1500:]]))
"""

# What is compiled, and how often: once for the first length, and once for any other. A cache
# allocates at its first step, and its second is every other.
QUICK = {
    "lengths('language')": 2,
    "lengths('language packed')": 2,
    "steps('rotary')": 2,
}
SLOW = {
    **{
        f"lengths({name!r})": 2
        for name in (
            "post",
            "bias",
            "learned",
            "concatenated",
            "padded",
            "packed",
            "packed post",
            "vision",
            "vision mean",
            "audio",
            "image",
        )
    },
    **{f"steps({name!r})": 2 for name in ("sinusoidal", "learned", "linear-bias", "concatenated")},
    "gradients('transformer')": 2,
    "gradients('transformer', checkpointing=True)": 2,
    "gradients('vision')": 2,
    "gradients('vision', checkpointing=True)": 2,
    "gradients('language')": 2,
    "gradients('language', checkpointing=True)": 2,
    "inductor()": 1,
}


def results(lines: dict[str, int]) -> dict[str, int | str]:
    run = subprocess.run(
        [sys.executable, "-c", COMPILED, *lines], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return dict(json.loads(line) for line in run.stdout.splitlines())


@pytest.fixture(scope="module")
def quick() -> dict[str, int | str]:
    return results(QUICK)


@pytest.fixture(scope="module")
def slow() -> dict[str, int | str]:
    return results(SLOW)


@pytest.mark.parametrize("line", QUICK)
def test_compiled(quick: dict[str, int | str], line: str) -> None:
    assert quick[line] == QUICK[line]


@pytest.mark.slow
@pytest.mark.parametrize("line", SLOW)
def test_everything_compiled(slow: dict[str, int | str], line: str) -> None:
    assert slow[line] == SLOW[line]
