"""The course's numbers about attention, recomputed in float64 by the product's own functions.

Each test is named by what it claims, and tells the item of the course's list. A printed number is
compared at its printed precision, and what lies behind it to the precision of float64. Where a
printed number comes from random vectors that were not printed (items 43, 50 and 52), the test
asserts what holds for all draws, and that the printed number is one that such draws give.
"""

import math
from collections import Counter
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.attention.attend import attend, distribution
from regard.attention.multihead import MultiHeadAttention
from regard.attention.position import Concatenated, SinusoidalPositions
from regard.attention.score import DotScore
from regard.attention.weights import attention_weights


def matrix(*rows: tuple[float, ...]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def orthonormal(rows: int, width: int) -> Tensor:
    return torch.linalg.qr(normal(width, rows)).Q.T.contiguous()


def rounded(tensor: Tensor, digits: int) -> list[float]:
    return [round(x, digits) for x in tensor.flatten().tolist()]


def same(actual: Tensor, expected: Tensor, tolerance: float = 1e-14) -> None:
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0)


QUERY = matrix((1, 2), (3, 1))
KEY = matrix((2, 1), (1, 1), (0, 1))
VALUE = matrix((1, 2, -2), (1, 1, 2), (0, 1, -1))


# Item 1


def test_one_query_over_three_states() -> None:
    states = matrix((1, 2, 3), (1, 2, 1), (0, 1, -1))
    query = matrix((1, 2, 1))
    scores = DotScore()(query, states)
    assert scores.tolist() == [[8, 6, 1]]
    assert rounded(attention_weights(query, states, beta=1.0), 4) == [0.8801, 0.1191, 0.0008]
    context = attend(query, states, states, beta=1.0)
    assert rounded(context, 4) == [0.9992, 1.9992, 2.7586]
    exponentials = [math.exp(s) for s in (8, 6, 1)]
    shares = matrix(tuple(e / math.fsum(exponentials) for e in exponentials))
    same(context, shares @ states)
    same(attention_weights(query, states, beta=1.0), scores.softmax(-1))


# Item 6


class Number:
    """A number that counts what is done to it."""

    def __init__(self, value: float, count: Counter[str]) -> None:
        self.value, self.count = value, count

    def _of(self, kind: str, value: float) -> "Number":
        self.count[kind] += 1
        return Number(value, self.count)

    def __mul__(self, other: "Number") -> "Number":
        return self._of("mul", self.value * other.value)

    def __add__(self, other: "Number") -> "Number":
        return self._of("add", self.value + other.value)

    def __truediv__(self, other: "Number") -> "Number":
        return self._of("div", self.value / other.value)

    def exp(self) -> "Number":
        return self._of("exp", math.exp(self.value))


def added(terms: list[Number]) -> Number:
    """The sum, which takes one addition less than there are terms."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def count_operations(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Counter[str]]:
    """softmax(Q Kᵀ / √d) V in plain loops, and how often each operation was executed."""
    count: Counter[str] = Counter()
    q, k, v = ([[Number(x, count) for x in row] for row in m.tolist()] for m in (query, key, value))
    root = Number(math.sqrt(key.shape[1]), count)
    outputs = []
    for row in q:
        scores = [added([a * b for a, b in zip(row, other, strict=True)]) / root for other in k]
        exponentials = [score.exp() for score in scores]
        total = added(exponentials)
        shares = [e / total for e in exponentials]
        columns = zip(*v, strict=True)
        outputs.append(
            [added([a * x for a, x in zip(shares, column, strict=True)]) for column in columns]
        )
    return matrix(*(tuple(x.value for x in row) for row in outputs)), count


def test_operations_of_exercise_3() -> None:
    output, count = count_operations(QUERY, KEY, VALUE)
    same(output, attend(QUERY, KEY, VALUE))
    assert (count["mul"], count["div"], count["add"]) == (30, 12, 22)


@pytest.mark.parametrize(
    ("n_q", "n_k", "d_k", "d_v"), [(2, 3, 2, 3), (5, 7, 11, 13), (7, 5, 3, 2), (1, 1, 1, 1)]
)
def test_operations_by_formula(n_q: int, n_k: int, d_k: int, d_v: int) -> None:
    query, key, value = normal(n_q, d_k), normal(n_k, d_k), normal(n_k, d_v)
    output, count = count_operations(query, key, value)
    same(output, attend(query, key, value))
    assert count["mul"] == n_q * n_k * d_k + n_q * d_v * n_k
    assert count["div"] == n_q * n_k + n_q * n_k
    assert count["add"] == n_q * n_k * (d_k - 1) + n_q * (n_k - 1) + n_q * d_v * (n_k - 1)
    assert count["exp"] == n_q * n_k
    # What the course leaves out, the total: O(n_q n_k (d_k + d_v)).
    total = count["mul"] + count["div"] + count["add"]
    assert total == n_q * (2 * n_k * (d_k + d_v + 1) - d_v - 1)
    assert total <= 2 * n_q * n_k * (d_k + d_v + 1)


# Item 8


def test_exercise_3() -> None:
    shares = attention_weights(QUERY, KEY)
    assert rounded(shares, 3) == [0.576, 0.284, 0.140, 0.882, 0.106, 0.013]
    output = attend(QUERY, KEY, VALUE)
    assert rounded(output, 3) == [0.860, 1.576, -0.724, 0.987, 1.882, -1.565]
    same(shares, (QUERY @ KEY.T / math.sqrt(2)).softmax(-1))
    same(output, shares @ VALUE)
    # Each query spends exactly 1, and the output is as wide as the values.
    same(shares.sum(-1), torch.ones(2).double())
    assert (shares.shape, output.shape) == ((2, 3), (2, 3))


def test_wrong_answers_to_exercise_3() -> None:
    assert rounded(attend(QUERY, KEY, VALUE, beta=1.0)[0], 3) == [0.910, 1.665, -0.931]
    # A softmax down the columns is one over the queries: keys and queries change places.
    columns = attention_weights(KEY, QUERY).T
    assert rounded((columns @ VALUE)[0], 3) == [0.437, 1.214, -0.223]
    same(columns.sum(0), torch.ones(3).double())
    assert (columns.sum(1) - 1).abs().min() > 0.1


# Item 40


def test_cold_means_a_large_beta() -> None:
    betas = (0.0, 0.1, 1 / math.sqrt(2), 2.0, 10.0)
    first = torch.stack([attention_weights(QUERY, KEY, beta=beta)[0, 0] for beta in betas])
    assert rounded(first, 3) == [0.333, 0.367, 0.576, 0.867, 1.000]
    # The scores of the first query are 4, 3 and 2.
    same(first, matrix(tuple(1 / (1 + math.exp(-b) + math.exp(-2 * b)) for b in betas))[0])
    assert all(a < b for a, b in pairwise(first.tolist()))


def test_a_value_is_preserved_by_one_hot_weights_that_are_no_identity() -> None:
    hard = attention_weights(QUERY, KEY, beta=math.inf)
    assert hard.tolist() == [[1, 0, 0], [1, 0, 0]]
    assert torch.equal(attend(QUERY, KEY, VALUE, beta=math.inf), VALUE[[0, 0]])
    same(attend(QUERY, KEY, VALUE, beta=100.0), VALUE[[0, 0]])
    hot = attend(QUERY, KEY, VALUE, beta=0.0)
    same(hot, VALUE.mean(0).expand(2, 3))


# Item 43


class Perturbed:
    """Many draws of a query, and what moving key j by ε of deviation σ does to its output."""

    def __init__(self, sigma: float, draws: int, S: int = 5, K: int = 4, V: int = 3) -> None:
        query, key, value = normal(draws, 1, K), normal(draws, S, K), normal(draws, S, V)
        j = 2
        epsilon = sigma * normal(draws, 1, K)
        moved = torch.cat((key[:, :j], key[:, j : j + 1] + epsilon, key[:, j + 1 :]), 1)
        before, after = attention_weights(query, key), attention_weights(query, moved)
        self.a, self.a_after = before[..., j], after[..., j]
        self.h = attend(query, key, value)[:, 0]
        self.h_after = attend(query, moved, value)[:, 0]
        self.v = value[:, j]
        self.exponent = (epsilon * query).sum(-1) / math.sqrt(K)  # βδ
        others = [i for i in range(S) if i != j]
        self.mean_of_others = (before[..., others] @ value[:, others])[:, 0] / (1 - self.a)

    def exact(self) -> tuple[Tensor, Tensor]:
        """a'_j = a_j e^{βδ} / (1 + a_j (e^{βδ} - 1)), h' = h + (a'_j - a_j)/(1 - a_j) (v_j - h)"""
        a = self.a * self.exponent.exp() / (1 + self.a * self.exponent.expm1())
        return a, self.h + (a - self.a) / (1 - self.a) * (self.v - self.h)

    def linear_error(self) -> Tensor:
        """Of h + β a_j δ (v_j - h), relative to how far the output moved."""
        linear = self.h + self.exponent * self.a * (self.v - self.h)
        return (linear - self.h_after).norm(dim=-1) / (self.h_after - self.h).norm(dim=-1)


SIGMAS = (0.001, 0.1, 1.0, 5.0)


@pytest.mark.parametrize("sigma", SIGMAS)
def test_a_moved_key_moves_the_output_on_a_straight_line(sigma: float) -> None:
    case = Perturbed(sigma, 401)
    a, h = case.exact()
    same(a, case.a_after)
    same(h, case.h_after)
    assert float((h - case.h_after).abs().median()) < 7e-16
    # The line between v_j and the mean of the others; a'_j says where on it.
    same(a * case.v + (1 - a) * case.mean_of_others, case.h_after)


@pytest.mark.parametrize(
    ("sigma", "printed"), list(zip(SIGMAS, (6e-5, 0.056, 0.27, 5.5), strict=True))
)
def test_the_printed_errors_of_the_linear_formula_are_within_their_draws(
    sigma: float, printed: float
) -> None:
    low, high = Perturbed(sigma, 4001).linear_error().quantile(matrix((0.02, 0.98))[0]).tolist()
    assert low < printed < high


def test_the_output_does_not_change_linearly() -> None:
    small, tenth, one, large = (float(Perturbed(s, 4001).linear_error().median()) for s in SIGMAS)
    assert small < 1e-3
    assert 80 < tenth / small < 120  # as σ itself, while it is small
    assert one > 0.1
    assert large > 0.5
    # To first order the relative error is |(1/2 - a_j) βδ|.
    case = Perturbed(0.001, 401)
    slope = ((0.5 - case.a) * case.exponent).abs()[:, 0]
    assert ((case.linear_error() - slope).abs() < case.exponent[:, 0] ** 2 + 1e-9).all()


# Item 44


@pytest.mark.parametrize(("sign", "limit"), [(1.0, 1.0), (-1.0, 0.0)])
def test_a_longer_key_wins_or_loses_by_its_direction(sign: float, limit: float) -> None:
    query, key = normal(1, 5), normal(7, 5)
    key[3] *= sign * float(torch.sign(query[0] @ key[3]))
    found = []
    for alpha in (1.0, 2.0, 5.0, 1e3):
        longer = key.clone()
        longer[3] *= alpha
        found.append(float(attention_weights(query, longer)[0, 3]))
    assert all(sign * a < sign * b for a, b in pairwise(found))
    assert found[-1] == pytest.approx(limit, abs=1e-15)


def test_a_longer_key_at_a_right_angle_changes_nothing() -> None:
    query, key = matrix((1, 2, 2)), normal(7, 3)
    key[3] = matrix((2, 1, -2))[0]
    assert float(query[0] @ key[3]) == 0
    longer = key.clone()
    longer[3] *= 1e3
    assert torch.equal(attention_weights(query, longer), attention_weights(query, key))


# Item 49


def test_self_attention_over_orthonormal_rows_is_not_the_identity() -> None:
    for beta, digits, printed in ((1.0, 3, 0.576), (10.0, 5, 0.99991)):
        for x in (torch.eye(3).double(), orthonormal(3, 5)):
            shares = attention_weights(x, x, beta=beta)
            assert rounded(shares.diag(), digits) == [printed] * 3
            diagonal = math.exp(beta) / (math.exp(beta) + 2)
            rest = (1 - diagonal) / 2
            eye = torch.eye(3).double()
            same(shares, diagonal * eye + rest * (1 - eye), 5e-15)
            error = float((attend(x, x, x, beta=beta) - x).norm(dim=-1).max())
            assert error == pytest.approx((1 - diagonal) * math.sqrt(1.5), rel=1e-9)


def test_it_becomes_the_identity_as_beta_grows() -> None:
    x = orthonormal(3, 5)
    assert torch.equal(attend(x, x, x, beta=math.inf), x)
    same(attend(x, x, x, beta=50.0), x)


# Item 50


def test_scores_of_zero_give_the_mean_and_no_permutation() -> None:
    key, value = orthonormal(5, 5), normal(5, 3)
    same(attend(torch.zeros(5, 5).double(), key, value), value.mean(0).expand(5, 3))


def test_attention_as_a_permutation() -> None:
    """q_i = β k_π(i) over orthonormal keys puts weight a on v_π(i), the rest on the others alike.

    The output misses v_π(i) by (1 - a) |v_π(i) - mean of the others|. So the printed errors, of
    values unknown, stand in known proportions, and those are the ones of five keys.
    """
    n, permutation = 5, torch.tensor([3, 0, 4, 2, 1])
    key, value = orthonormal(n, n), normal(n, 7)
    wanted = value[permutation]
    distance = (wanted - (value.sum(0) - wanted) / (n - 1)).norm(dim=-1)
    missed = {}
    for beta in (1.0, 5.0, 20.0):
        query = beta * key[permutation]
        missed[beta] = (n - 1) / (math.exp(beta) + n - 1)
        shares = attention_weights(query, key, beta=1.0)
        same(
            shares[torch.arange(n), permutation],
            torch.full((n,), 1 - missed[beta], dtype=torch.float64),
        )
        error = (attend(query, key, value, beta=1.0) - wanted).norm(dim=-1)
        torch.testing.assert_close(error, missed[beta] * distance, atol=1e-14, rtol=1e-12)
    scale = 1.4 / missed[1.0]
    assert round(scale * missed[5.0], 2) == 0.06
    assert round(scale * missed[20.0], 8) == 2e-8


# Item 52


def rotation(shift: int, width: int, base: float = 10000) -> Tensor:
    """The matrix R for which R r_n = r_{n + shift}, whatever n is."""
    blocks = []
    for i in range(0, width, 2):
        angle = shift / base ** (i / width)
        blocks.append(
            matrix((math.cos(angle), math.sin(angle)), (-math.sin(angle), math.cos(angle)))
        )
    return torch.block_diag(*blocks)


def convolving(kernel: Tensor, width: int, beta: float) -> MultiHeadAttention:
    """Multi-head attention over [x; r], one head for each tap of the kernel (O, C, k).

    Head t turns its query's position by t - k // 2 and finds the key that stands there; it passes
    the values on, and its part of the output projection is the tap.
    """
    _, C, k = kernel.shape
    layer = MultiHeadAttention(
        C + width,
        k,
        key_width=width,
        value_width=C,
        output_width=len(kernel),
        beta=beta,
        bias=False,
    ).double()
    nothing = torch.zeros(width, C).double()
    turns = [rotation(t - k // 2, width) for t in range(k)]
    with torch.no_grad():
        layer.query.weight.copy_(torch.cat([torch.cat((nothing, turn), 1) for turn in turns]))
        layer.key.weight.copy_(torch.cat((nothing, torch.eye(width).double()), 1).repeat(k, 1))
        layer.value.weight.copy_(torch.eye(C, C + width).double().repeat(k, 1))
        layer.output.weight.copy_(torch.cat([kernel[..., t] for t in range(k)], 1))
    return layer


@pytest.mark.parametrize("shift", [-1, 0, 1, 17])
def test_a_matrix_shifts_every_position(shift: int) -> None:
    position = SinusoidalPositions(64)
    n = torch.arange(-3, 101)
    shifted = position.encoding(n, torch.float64) @ rotation(shift, 64).T
    same(shifted, position.encoding(n + shift, torch.float64), 1e-13)


def test_k_heads_with_positions_are_a_convolution() -> None:
    n, width = 31, 64
    x, kernel = normal(n, 3), normal(5, 3, 3)
    convolution = F.conv1d(x.T[None], kernel, padding=1)[0].T
    errors = {}
    for beta in (10.0, 100.0):
        layer = convolving(kernel, width, beta)
        output = layer(Concatenated(SinusoidalPositions(width))(x)).detach()
        errors[beta] = float((output - convolution)[1:-1].abs().max())
    # 4e-4 was printed for numbers unknown: what they change is the factor of this share.
    assert 1e-4 < errors[10.0] < 1e-3
    assert errors[100.0] < 1e-13


def test_how_far_a_head_sees_beside_its_position() -> None:
    """A neighbour's score is lower by Σ (1 - cos ω_k), over 32 frequencies about 1.08."""
    r = SinusoidalPositions(64).encoding(torch.arange(31), torch.float64)
    gap = sum(1 - math.cos(10000 ** (-i / 64)) for i in range(0, 64, 2))
    for beta in (10.0, 100.0):
        shares = attention_weights(r, r, beta=beta)[15]
        expected = shares[15] * math.exp(-beta * gap)
        torch.testing.assert_close(shares[[14, 16]], expected.expand(2), atol=0, rtol=1e-9)
        # At β = 100 the neighbours' share is below what float64 can take from 1.
        assert (float(shares[15]) == 1.0) == (beta == 100.0)


def test_one_head_alone_has_taps_of_one_matrix_and_one_sign() -> None:
    n, middle = 31, 15
    r = SinusoidalPositions(64).encoding(torch.arange(n), torch.float64)
    # A query that likes the right neighbour best and dislikes the left one.
    query = (r @ (2 * rotation(1, 64) - rotation(-1, 64)).T)[[middle]]
    tap = normal(3, 5)

    def head(x: Tensor) -> Tensor:
        return attend(query, r, x @ tap)[0]

    taps_OSC = torch.autograd.functional.jacobian(head, normal(n, 3))
    shares = attention_weights(query, r)[0]
    assert (shares > 0).all()
    same(taps_OSC, torch.einsum("co,s->osc", tap, shares))
    # So [-1, 0, 1] is out of its reach, whereas two heads give it.
    ratio = taps_OSC[:, middle + 1] / taps_OSC[:, middle - 1]
    assert (ratio > 0).all()
    difference = torch.tensor([-1.0, 0.0, 1.0]).double().view(1, 1, 3)
    x = normal(n, 1)
    output = convolving(difference, 64, 100.0)(Concatenated(SinusoidalPositions(64))(x)).detach()
    same(output[1:-1], x[2:] - x[:-2], 1e-13)


# Item 89


def test_four_words_in_any_projection() -> None:
    words = matrix((1, 0, 0), (0, 1, 0), (1, 1, 0), (0, 0, 1))
    w_q, w_k, w_v = normal(3, 2), normal(3, 2), normal(3, 2)
    query, key, value = words @ w_q, words @ w_k, words @ w_v
    scores = DotScore()(query, key)
    # The third word is the sum of the first two, as a key and as a query.
    same(scores[:, 2], scores[:, 0] + scores[:, 1])
    same(scores[2], scores[0] + scores[1])
    shares = attention_weights(query, key, beta=1.0)
    same(shares[:, 2] / (shares[:, 0] * shares[:, 1]), scores.exp().sum(-1), 1e-11)
    same(attend(query, key, value, beta=1.0), scores.softmax(-1) @ value)


# Item 92


def test_shuffling_key_value_pairs_changes_nothing() -> None:
    audio, text = normal(7, 5), normal(11, 3)
    shuffle = torch.randperm(11)
    layer = MultiHeadAttention(5, 2, key_width=3, source_width=3).double()
    same(layer(audio, text[shuffle]), layer(audio, text))
    query, key, value = normal(7, 5), normal(11, 5), normal(11, 2)
    output = attend(query, key, value)
    same(attend(query, key[shuffle], value[shuffle]), output)
    same(attention_weights(query, key[shuffle]), attention_weights(query, key)[:, shuffle])
    # Pairs must stay pairs, and the queries' order is the output's.
    assert (attend(query, key, value[shuffle]) - output).abs().max() > 0.1
    order = torch.randperm(7)
    same(attend(query[order], key, value), output[order])


# Item 97


def test_frequencies_are_counted_from_zero() -> None:
    right = SinusoidalPositions(4).encoding(torch.tensor([1]), torch.float64)[0]
    assert rounded(right, 2) == [0.84, 0.54, 0.01, 1.0]
    frequencies = [10000 ** (-2 * k / 4) for k in (0, 1)]
    same(right, matrix(tuple(f(w) for w in frequencies for f in (math.sin, math.cos)))[0])
    # Counted from 1 the fastest frequency is lost: neighbours are as good as equal.
    wrong = matrix(tuple(f(10000 ** (-2 * k / 4)) for k in (1, 2) for f in (math.sin, math.cos)))[0]
    assert [round(x, digits) for x, digits in zip(wrong.tolist(), (2, 2, 4, 2), strict=True)] == [
        0.01,
        1.0,
        0.0001,
        1.0,
    ]
    zero = matrix((0, 1, 0, 1))[0]
    same(SinusoidalPositions(4).encoding(torch.tensor([0]), torch.float64)[0], zero, 0)
    assert float((right - zero).norm()) > 0.9
    assert float((wrong - zero).norm()) < 0.011


# All of them stand on one function.


def test_the_weights_are_those_of_the_formula() -> None:
    same(attention_weights(QUERY, KEY), distribution(QUERY, KEY, beta=1 / math.sqrt(2)))
