"""Habits of heads, merged words and rollout, beside plain loops."""

import math

import pytest
import torch

from regard.attention.mask import causal
from regard.look.heads import by_words, habits
from regard.look.record import AttentionCall
from regard.look.rollout import rollout


@pytest.mark.parametrize(("L", "S"), [(7, 7), (5, 11), (131, 131)])
def test_habits_are_means_over_rows(L: int, S: int) -> None:
    asked = AttentionCall(torch.randn(2, 3, L, 4), torch.randn(2, 3, S, 4), causal(), None, None)
    found = habits(asked, 1)
    weights = asked.weights()[1].double().tolist()
    for head in range(3):
        rows = weights[head]
        expected = {
            "entropy": sum(-w * math.log(w) for row in rows for w in row if w) / L,
            "same": sum(row[i + S - L] for i, row in enumerate(rows)) / L,
            "previous": sum(row[i + S - L - 1] for i, row in enumerate(rows) if i + S - L) / L,
            "next": sum(row[i + S - L + 1] for i, row in enumerate(rows) if i + 1 < L) / L,
            "first": sum(row[0] for row in rows) / L,
            "last": sum(row[-1] for row in rows) / L,
        }
        assert found.of(head) == pytest.approx(expected, abs=1e-6)


def test_subwords_become_words() -> None:
    weights = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.5, 0.1, 0.4, 0.0], [0.2, 0.2, 0.2, 0.4]])
    merged = by_words(weights, [0, 0, -1, 1], [0, 1, 1])
    expected = [[0.3, 0.4], [(0.6 + 0.4) / 2, (0.0 + 0.4) / 2]]
    torch.testing.assert_close(merged, torch.tensor(expected))


def test_words_keep_the_mass_of_a_row() -> None:
    weights = torch.rand(2, 3, 5, 7).softmax(-1)
    merged = by_words(weights, [0, 1, 1, 2, 2, 2, 3], [0, 0, 1, 2, 2])
    assert merged.shape == (2, 3, 3, 4)
    torch.testing.assert_close(merged.sum(-1), torch.ones(2, 3, 3))


def test_rollout_follows_the_layers() -> None:
    layers = torch.rand(3, 2, 4, 4).softmax(-1)
    expected = [[float(i == j) for j in range(4)] for i in range(4)]
    for layer in layers.tolist():
        mixed = [
            [(layer[0][i][j] + layer[1][i][j]) / 4 + (i == j) / 2 for j in range(4)]
            for i in range(4)
        ]
        expected = [
            [sum(mixed[i][k] * expected[k][j] for k in range(4)) for j in range(4)]
            for i in range(4)
        ]
    found = rollout(layers)
    torch.testing.assert_close(found, torch.tensor(expected))
    torch.testing.assert_close(found.sum(-1), torch.ones(4))


def test_without_a_residual_one_layer_is_its_mean() -> None:
    layer = torch.rand(1, 3, 5, 5).softmax(-1)
    torch.testing.assert_close(rollout(layer, residual=0), layer[0].mean(0))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("layers", "residual"), [([], 0.5), ([torch.eye(2)[None]], 1.5)])
def test_what_cannot_be_rolled_out(layers: list[torch.Tensor], residual: float) -> None:
    with pytest.raises(ValueError, match="must be"):
        rollout(layers, residual)
