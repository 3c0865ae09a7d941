"""The state of a sharded training, where its files are gone or damaged."""

from pathlib import Path

import pytest
import torch

from regard.checkpoint import Saved
from regard.train.distributed import World
from regard.train.state import State, read_tensors


def test_shards_that_are_missing_or_damaged(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    saved = Saved(torch.nn.Linear(2, 3), None, None, tmp_path / "last", {})
    state, into, world = (
        State(shards="shards/5"),
        {"x": torch.zeros(2)},
        World(device=torch.device("cpu")),
    )
    shards = tmp_path / "shards" / "5"
    with pytest.raises(ValueError, match=f"^{shards} is missing, .* copy the whole run"):
        read_tensors(tmp_path, saved, state, into, world)
    shards.mkdir(parents=True)
    for content in (None, b"noise"):
        if content is not None:
            (shards / "shard-00001-model-00001-of-00001.safetensors").write_bytes(content)
        with pytest.raises(ValueError, match=f"^{shards}[^ ]* is damaged [^\n]* restore it$"):
            read_tensors(tmp_path, saved, state, into, world)
    assert capfd.readouterr().err == ""
