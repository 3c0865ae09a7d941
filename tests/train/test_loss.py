"""The loss in pieces equals the loss at once: value, gradients, smoothing, targets left out."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.train import loss, softmax_cpu
from regard.train.loss import cross_entropy, divergence

T, D, N = 11, 7, 13


def problem(dtype: torch.dtype, bias: bool = True) -> tuple[Tensor, nn.Linear, Tensor]:
    states = torch.randn(3, T, D, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, N, (3, T))
    targets[1, 2:5] = -100
    return states, nn.Linear(D, N, bias=bias, dtype=dtype), targets


def at_once(states: Tensor, output: nn.Linear, targets: Tensor, smoothing: float) -> Tensor:
    logits = output(states).flatten(0, -2)
    return F.cross_entropy(logits, targets.flatten(), label_smoothing=smoothing, reduction="sum")


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk", [1, 2 * N + 1, 33 * N, 2**26])
def test_equals_torch(
    monkeypatch: pytest.MonkeyPatch, smoothing: float, bias: bool, chunk: int
) -> None:
    for limit in ("CHUNK", "CACHED"):
        monkeypatch.setattr(loss, limit, chunk)
    states, output, targets = problem(torch.float64, bias)
    inputs = [states, *output.parameters()]
    have = cross_entropy(states=states, output=output, target=targets, smoothing=smoothing)
    want = at_once(states, output, targets, smoothing)
    torch.testing.assert_close(have, want)
    # The factor in front reaches the gradients.
    for a, b in zip(torch.autograd.grad(have / 5, inputs), torch.autograd.grad(want / 5, inputs)):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    states, output, targets = problem(torch.float32)
    want = at_once(states, output, targets, 0.1)
    wanted = torch.autograd.grad(want, [states, output.weight])
    with torch.autocast("cpu", dtype):
        have = cross_entropy(states, output, targets, 0.1)
    assert have.dtype == torch.float32
    torch.testing.assert_close(have, want, rtol=2e-2, atol=0)
    for a, b in zip(torch.autograd.grad(have, [states, output.weight]), wanted):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=5e-2, atol=5e-2)


kernel = pytest.mark.skipif(
    softmax_cpu.SOURCE.library() is None, reason=softmax_cpu.SOURCE.missing()
)


@kernel
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("classes", [3, 16, 1013])
def test_the_kernel_of_a_cpu(smoothing: float, bias: bool, classes: int) -> None:
    """Against torch in float64, with rows that end within a vector of the kernel and at its end."""
    torch.manual_seed(7)
    states, output = torch.randn(T, D), nn.Linear(D, classes, bias=bias)
    targets = torch.randint(0, classes, (T,))
    targets[3:5] = -100
    found = []
    for dtype, compute in ((torch.float32, cross_entropy), (torch.float64, at_once)):
        output.to(dtype)
        leaf = (30 * states).to(dtype).requires_grad_()
        value = compute(leaf, output, targets, smoothing)
        found.append([value, *torch.autograd.grad(value, [leaf, *output.parameters()])])
    for have, want in zip(*found):
        torch.testing.assert_close(have.double(), want, rtol=1e-5, atol=1e-4)
    assert not found[0][1][3:5].any()


@kernel
def test_threads_change_no_bit_of_the_kernel() -> None:
    logits, targets = torch.randn(37, 101), torch.randint(-1, 101, (37,))
    before, found = torch.get_num_threads(), []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        slopes = logits.clone()
        found.append((softmax_cpu.losses(slopes, None, targets, 0.1), slopes))
    torch.set_num_threads(before)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@kernel
def test_the_kernel_hides_no_nan() -> None:
    logits, targets = torch.randn(5, 40), torch.tensor([1, 2, 3, 4, -1])
    logits[1, 7], logits[2, 8] = math.nan, math.inf
    assert softmax_cpu.losses(logits, None, targets, 0.1).isnan().tolist() == [
        False,
        True,
        True,
        False,
        False,
    ]


def test_the_loss_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    states, output, targets = problem(torch.float32)
    wanted = cross_entropy(states, output, targets, 0.1)
    monkeypatch.setattr(softmax_cpu.SOURCE, "library", lambda: None)
    torch.testing.assert_close(cross_entropy(states, output, targets, 0.1), wanted)


def test_only_what_is_wanted_is_computed() -> None:
    states, output, targets = problem(torch.float64)
    output.requires_grad_(False)
    (slope,) = torch.autograd.grad(cross_entropy(states, output, targets, 0.1), [states])
    (want,) = torch.autograd.grad(at_once(states, output, targets, 0.1), [states])
    torch.testing.assert_close(slope, want)
    with torch.no_grad():
        have = cross_entropy(states, output, targets, 0.1)
    assert not have.requires_grad


def test_nothing_to_count() -> None:
    states, output, targets = problem(torch.float64)
    total = cross_entropy(states, output, torch.full_like(targets, -1), 0.1)
    assert total == 0
    assert all(grad.eq(0).all() for grad in torch.autograd.grad(total, [states, output.weight]))
    empty = cross_entropy(states[:, :0], output, targets[:, :0], 0.1)
    assert empty == 0


def test_tied_weights_receive_both_gradients() -> None:
    table = nn.Embedding(N, D, dtype=torch.float64)
    output = nn.Linear(D, N, bias=False, dtype=torch.float64)
    output.weight = table.weight
    ids, targets = torch.randint(0, N, (1, T)), torch.randint(0, N, (1, T))
    (have,) = torch.autograd.grad(cross_entropy(table(ids), output, targets), [table.weight])
    (want,) = torch.autograd.grad(at_once(table(ids), output, targets, 0.0), [table.weight])
    torch.testing.assert_close(have, want)


@pytest.mark.usefixtures("unchecked")
def test_errors() -> None:
    states, output, targets = problem(torch.float32)
    with pytest.raises(ValueError, match=r"label smoothing \(1.0\) must be at least 0 and below 1"):
        cross_entropy(states, output, targets, 1.0)
    with pytest.raises(ValueError, match=r"\(3, 11, 7\) need targets of shape \(3, 11\), got \(3,"):
        cross_entropy(states, output, targets[:, 1:])


def apart_at_once(one: Tensor, two: Tensor, output: nn.Linear, targets: Tensor) -> Tensor:
    p, q = (output(states).log_softmax(-1)[targets >= 0] for states in (one, two))
    both = [F.kl_div(a, b, reduction="sum", log_target=True) for a, b in ((p, q), (q, p))]
    return 0.5 * (both[0] + both[1])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk", [1, 2 * N + 1, 2**26])
def test_the_divergence_of_two_passes(
    monkeypatch: pytest.MonkeyPatch, bias: bool, chunk: int
) -> None:
    for limit in ("CHUNK", "CACHED"):
        monkeypatch.setattr(loss, limit, chunk)
    one, output, targets = problem(torch.float64, bias)
    two = torch.randn_like(one, requires_grad=True)
    inputs = [one, two, *output.parameters()]
    have, want = (f(one, two, output, targets) for f in (divergence, apart_at_once))
    torch.testing.assert_close(have, want)
    for a, b in zip(torch.autograd.grad(3 * have, inputs), torch.autograd.grad(3 * want, inputs)):
        torch.testing.assert_close(a, b)
    assert divergence(one, one, output, targets) == 0


def test_the_divergence_under_autocast() -> None:
    one, output, targets = problem(torch.float32)
    two = (one + 0.5 * torch.randn_like(one)).detach().requires_grad_()
    want = apart_at_once(one, two, output, targets)
    wanted = torch.autograd.grad(want, [one, output.weight])
    with torch.autocast("cpu", torch.bfloat16):
        have = divergence(one, two, output, targets)
    torch.testing.assert_close(have, want, rtol=3e-2, atol=0)
    for a, b in zip(torch.autograd.grad(have, [one, output.weight]), wanted):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=5e-2, atol=5e-2)


class Scaled(nn.Linear):
    """An output layer with another forward pass than its class's."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def losses(states: Tensor, output: nn.Module, targets: Tensor) -> list[Tensor]:
    return [
        cross_entropy(states, output, targets, 0.1),
        divergence(states, 2 * states, output, targets),
    ]


def test_a_subclass_of_linear_predicts_with_its_own_forward() -> None:
    states, plain, targets = problem(torch.float64)
    output = Scaled(D, N, dtype=torch.float64)
    output.load_state_dict({name: p / 2 for name, p in plain.state_dict().items()})
    for have, want in zip(losses(states, output, targets), losses(states, plain, targets)):
        torch.testing.assert_close(have, want)
        (slope,) = torch.autograd.grad(have, [output.weight])
        (expected,) = torch.autograd.grad(want, [plain.weight])
        torch.testing.assert_close(slope, 2 * expected)


def test_hooks_of_the_output_layer_fire() -> None:
    states, output, targets = problem(torch.float64)
    fired: list[str] = []
    handle = output.register_full_backward_hook(lambda *_: fired.append("backward"))
    for value in losses(states, output, targets):
        value.backward()
    assert fired == ["backward"] * 3  # a divergence compares two passes
    handle.remove()
    output.register_forward_hook(lambda module, given, logits: 2 * logits)
    have = losses(states, output, targets)
    output._forward_hooks.clear()
    with torch.no_grad():
        for parameter in output.parameters():
            parameter.mul_(2)
    for mine, want in zip(have, losses(states, output, targets)):
        torch.testing.assert_close(mine, want)


@pytest.mark.parametrize("kind", [nn.Linear, type("Own", (nn.Linear,), {})])
def test_targets_beyond_the_logits_are_refused(kind: type[nn.Linear]) -> None:
    with pytest.raises(ValueError, match=r"a target \(13\) must be below .* logits \(13\)"):
        cross_entropy(torch.randn(2, D), kind(D, N), torch.tensor([N, 1]))
