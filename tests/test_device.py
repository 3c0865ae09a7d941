"""The device that a name stands for, on this machine and on others."""

import pytest
import torch

from regard.device import device, multiplies_bfloat16


def test_apple_s_gpu_where_torch_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert device("mps").type == "mps"
    with pytest.raises(ValueError, match='the last is "mps"'):
        device("mps:1")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ValueError, match="torch finds none"):
        device("mps")


@pytest.mark.parametrize(
    ("capability", "has", "expected"),
    [("AVX512", True, True), ("AVX512", False, False), ("AVX2", True, False)],
)
def test_products_of_bfloat16(
    monkeypatch: pytest.MonkeyPatch, capability: str, has: bool, expected: bool
) -> None:
    """A processor that has the instructions may be told not to use them."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has)
    assert multiplies_bfloat16.__wrapped__("cpu") is expected
    assert multiplies_bfloat16.__wrapped__("mps") is False
