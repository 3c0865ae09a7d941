"""A model that reads 16,384 tokens is recorded and looked at without its matrices of weights."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

SCRIPT = """
import json
from pathlib import Path
import torch
from regard.look.record import record
from regard.look.view import maps
from regard.model.language import LanguageConfig, LanguageModel

def peak():  # MiB of this process
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024

torch.manual_seed(0)
N = 16_384
model = LanguageModel(LanguageConfig.tiny(1000)).eval()
tokens = torch.randint(1000, (1, N))
with torch.inference_mode():
    model.states(tokens[:, :64])
    plain = model.states(tokens)
    before = peak()
    with record(model) as seen:
        recorded = model.states(tokens)
    asked = seen["decoder.blocks.3.attention"]
    rows = [0, 1, 8191, N - 1]
    found = asked.weights(rows)
    wrong = 0.0
    for n, row in enumerate(rows):
        scores = asked.query[0, :, row : row + 1] @ asked.key[0, :, : row + 1].mT / 32**0.5
        exact = torch.zeros(4, N).index_copy(1, torch.arange(row + 1), scores.softmax(-1)[:, 0])
        wrong = max(wrong, float((found[0, :, n] - exact).abs().max()))
    names = [str(n) for n in range(N)]
    (shown,) = maps(seen, (), names, names)
    sums = shown.weights.sum(-1)
print(json.dumps({
    "same": torch.equal(plain, recorded), "wrong": wrong, "memory": peak() - before,
    "shape": list(shown.weights.shape), "last": shown.rows[-1],
    "off": float((sums - 1).abs().max()),
    "entropy": max(float(one.entropy.max()) for one in shown.habits),
}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of memory from /proc")
def test_16_384_tokens() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["same"]
    assert found["wrong"] < 1e-5
    assert found["shape"] == [4, 4, 256, 256]
    assert found["last"] == "16383"
    assert found["off"] < 1e-4
    assert 0 < found["entropy"] < 10
    # The weights of its 16 heads would take 16 GiB.
    assert found["memory"] < 1024
