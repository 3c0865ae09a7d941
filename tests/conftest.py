"""What every test stands on: fixed seeds, one Hypothesis profile, and devices where they exist."""

import importlib.util
import os
import random
import signal
import threading

# Read when keras is first imported; without it keras would look for TensorFlow.
os.environ.setdefault("KERAS_BACKEND", "torch")

import hypothesis
import jaxtyping
import pytest
import torch

from tests.devices import round_in_the_interpreter

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton's kernels run on a CPU."""


class _TorchRandom:
    """Torch's generator as Hypothesis wants it, so that every example starts from one seed."""

    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


# Hypothesis holds it weakly.
_torch_random = _TorchRandom()
hypothesis.register_random(_torch_random)

# Who starts the tests in the background has them, and all that they start, ignore these.
if threading.current_thread() is threading.main_thread():
    for ignored, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        if signal.getsignal(ignored) is signal.SIG_IGN:
            signal.signal(ignored, handler)

# The same examples every time, and no verdict that depends on how busy the machine is.
hypothesis.settings.register_profile(
    "ci",
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shuffle", type=int, metavar="SEED", help="run the tests in this random order"
    )


def pytest_configure() -> None:
    if INTERPRETED and importlib.util.find_spec("triton") is not None:
        round_in_the_interpreter()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed = config.getoption("--shuffle")
    if seed is not None:
        random.Random(seed).shuffle(items)
    if torch.cuda.is_available():
        return
    for item in items:
        kernel = item.get_closest_marker("triton") and INTERPRETED
        if item.get_closest_marker("gpu") and not kernel:
            item.add_marker(pytest.mark.skip(reason="needs CUDA"))


@pytest.fixture(autouse=True)
def _alike_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """One seed, and no terminal: what is printed is as wide and as plain on every machine."""
    torch.manual_seed(0)
    for name in ("COLUMNS", "LINES", "TERM", "FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switches the checks of annotations off, as in the product.

    For tests of our own errors, which the checks would forestall, and of torch.compile, which
    cannot see through them. jaxtyping asks its configuration at every call. Beside `@given`, name
    it by `@pytest.mark.usefixtures("unchecked")`: Hypothesis refuses it as an argument.
    """
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
