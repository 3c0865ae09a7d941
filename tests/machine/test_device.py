"""The device that a name stands for, on this machine and on others."""

import pytest
import torch

from regard.machine.device import device, multiplies_bfloat16, use


def test_apple_s_gpu_where_torch_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert device("mps").type == "mps"
    with pytest.raises(ValueError, match='the last is "mps"'):
        device("mps:1")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ValueError, match="torch finds none"):
        device("mps")


def test_one_of_several_gpus_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    for name in ("cpu", "auto", "cuda"):  # which leave it as it is
        assert use(name) == device(name)
    assert not current
    assert use("cuda:1") == torch.device("cuda:1")
    assert current == [torch.device("cuda:1")]
    with pytest.raises(ValueError, match='the last is "cuda:1"'):
        use("cuda:2")


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
