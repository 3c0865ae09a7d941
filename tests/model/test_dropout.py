"""Dropout: what it leaves, on average and in its gradients, and when it does nothing."""

import pytest
import torch
from torch import Tensor, nn

from regard.model.dropout import Dropout


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_entries_are_dropped_and_the_mean_stays(p: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    y = Dropout(p)(torch.ones(997, 1009, dtype=dtype))
    assert abs((y == 0).double().mean() - p) < 0.002
    assert abs(y.double().mean() - 1) < 0.02
    kept = y[y != 0]
    assert torch.allclose(kept.double(), torch.full_like(kept, 1 / (1 - p)).double(), rtol=0.01)


@pytest.mark.parametrize("p", [0.1, 0.3, 0.0123])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_the_mean(p: float, dtype: torch.dtype) -> None:
    """The factors of all levels are averaged, without chance: each level is drawn once."""
    levels = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Tensor,
            "random_",
            lambda words, *range: words.view(torch.int16).copy_(levels).view(torch.int64),
        )
        y = Dropout(p)(torch.ones(2**16, dtype=dtype))
    assert abs(y.double().mean() - 1) < 1e-6
    assert abs((y == 0).double().mean() - p) < 1e-5
    assert len(y.unique()) == 3  # zero, and the two numbers around 1 / (1 - p)


def test_gradients_of_each_sample() -> None:
    model = nn.Sequential(nn.Linear(5, 3), Dropout(0.5))
    parameters, rows = dict(model.named_parameters()), torch.ones(64, 5)

    def loss(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, row).sum()

    each = torch.func.vmap(torch.func.grad(loss), (None, 0), randomness="different")
    grads = each(parameters, rows)["0.bias"]
    assert grads.shape == (64, 3)
    assert set(grads.unique().tolist()) == {0.0, 2.0}
    assert len(grads.unique(dim=0)) > 4


def test_neighbours_are_dropped_independently() -> None:
    """Four entries share a draw of 64 bits."""
    torch.manual_seed(0)
    dropped = (Dropout(0.5)(torch.ones(4 * 100_003)) == 0).double().view(-1, 4)
    covariance = torch.cov(dropped.T)
    assert (covariance - torch.diag(covariance.diagonal())).abs().max() < 0.005


def test_the_gradient_is_the_mask() -> None:
    x = torch.randn(5, 7, 11, dtype=torch.float64).transpose(0, 2).requires_grad_()
    y = Dropout(0.3)(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(y, x * grad)
    assert (grad == 0).any()
    assert (grad > 1).any()


def test_a_seed_decides() -> None:
    x, layer = torch.ones(13, 17), Dropout(0.2)
    torch.manual_seed(3)
    first = layer(x)
    torch.manual_seed(3)
    assert torch.equal(layer(x), first)
    assert not torch.equal(layer(x), first)


@pytest.mark.parametrize("p", [0.0, 0.25, 1.0])
def test_evaluation_and_extremes_are_torchs_own(p: float) -> None:
    x = torch.randn(3, 5)
    assert torch.equal(Dropout(p).eval()(x), x)
    if p != 0.25:
        assert torch.equal(Dropout(p)(x), nn.Dropout(p)(x))
    assert Dropout(p)(torch.empty(0, 5)).shape == (0, 5)
