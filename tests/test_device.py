"""The device that a name stands for, on this machine and on others."""

import pytest
import torch

from regard.device import device


def test_apple_s_gpu_where_torch_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert device("mps").type == "mps"
    with pytest.raises(ValueError, match='the last is "mps"'):
        device("mps:1")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ValueError, match="torch finds none"):
        device("mps")
