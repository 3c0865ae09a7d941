"""Two replicas on Ray Serve give the direct answers."""

import json
import urllib.request
from pathlib import Path

import pytest

from regard import load
from tests.processes import HANG
from tests.service.samples import TEXTS, translator

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("unchecked"),
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]


def test_two_replicas(tmp_path: Path) -> None:
    ray = pytest.importorskip("ray", reason="an extra: regard[ray]")
    from ray import serve

    from regard.serve.ray import application

    folder = translator(tmp_path / "en-de")
    want = load(folder).translate(TEXTS)
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": 8765})
        serve.run(application({"en-de": str(folder)}, replicas=2, num_cpus=1))
        status = serve.status().applications["default"].deployments["Regard"]
        assert status.replica_states == {"RUNNING": 2}
        for text, translation in zip(TEXTS, want):
            asked = urllib.request.Request(
                "http://127.0.0.1:8765/v1/translate",
                json.dumps({"text": text}).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(asked, timeout=HANG) as answer:
                assert json.load(answer)["translations"][0]["text"] == translation
    finally:
        serve.shutdown()
        ray.shutdown()
