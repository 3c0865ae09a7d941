"""Checks for answers typed as short formulas; each is evaluated beside the right one.

A formula of sizes is tried on several sizes, a formula of matrices on random ones, so that it does
not matter how it is written.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.attention.weights import attention_weights
from regard.lab.exercises.expression import evaluate
from regard.lab.exercises.marking import BLANK, Case, mark

Names = Mapping[str, Tensor]


@dataclass(frozen=True)
class Question:
    """What is asked for, the right formula, and the wrong ones that people write."""

    name: str
    right: str
    names: Names
    mistakes: Sequence[tuple[str, str]]
    seen: Callable[[Tensor], Tensor] = lambda value: value
    """What is compared, where it is not the formula's value itself."""

    def value(self, formula: str) -> Tensor:
        return self.seen(evaluate(formula, self.names))


def _check(question: Question, answer: str) -> None:
    """Prints one line: that the answer is right, or what is wrong with it."""
    if answer.strip() in ("", "?"):
        print(f"… {question.name}: {BLANK}")
        return
    try:
        found = question.value(answer)
    except ValueError as error:
        print(f"✗ {question.name}: {error}")
        return
    right = question.value(question.right)
    if not found.ndim:
        found = found.expand(right.shape)
    mistakes = [
        (question.value(wrong).expand(right.shape), message) for wrong, message in question.mistakes
    ]
    mark(question.name, [Case(answer, lambda: found, right, mistakes)])


def _sizes(*names: str) -> dict[str, Tensor]:
    """Three different primes for each name."""
    primes = (3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53)
    return {
        name: torch.tensor(primes[n :: len(names)][:3], dtype=torch.float64)
        for n, name in enumerate(names)
    }


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# Temperature


def cold(answer: str) -> None:
    """β goes to …, so that attention copies one value."""
    mistakes = [
        ("0", "β is an inverse temperature: cold is a large β; at 0 all values are mixed"),
        ("1", "at β = 1 the other values still have some weight; how large must β be?"),
        ("-inf", "at −∞ the worst key is picked, not the best"),
    ]
    _check(Question("β, to copy one value", "inf", {}, mistakes), answer)


def hot(answer: str) -> None:
    """β goes to …, so that attention mixes all values evenly."""
    mistakes = [
        ("inf", "hot is a small β; at ∞ one value is picked"),
        ("1", "at β = 1 better keys still have more weight; how small must β be?"),
    ]
    _check(Question("β, to mix all values", "0", {}, mistakes), answer)


def even(answer: str) -> None:
    """Each of the weights, at β = 0, for n queries, m keys, and values of width t."""
    mistakes = [
        (
            "1/t",
            "t is the width of a value; the weights are shared by the keys, of which there are m",
        ),
        ("1/n", "n counts the queries; the weights of one query are shared by the m keys"),
        ("m", "m weights add up to 1; how large is each?"),
    ]
    _check(Question("a weight at β = 0", "1/m", _sizes("n", "m", "t"), mistakes), answer)


def convenient(answer: str) -> None:
    """The usual β, for keys of width d and values of width t."""
    mistakes = [
        ("1/d", "the variance of a score is d; its root is the scale"),
        ("1/sqrt(t)", "values have no part in the scores: take the width of the keys"),
        ("sqrt(d)", "the scores are to become smaller: divide by √d"),
        ("d", "the scores are to become smaller: divide by √d"),
    ]
    _check(Question("a convenient β", "1/sqrt(d)", _sizes("d", "t"), mistakes), answer)


# Matrices


def _columns() -> Names:
    """Queries, keys and values as columns."""
    Q, K, V = _random(0, 5, 3), _random(1, 5, 7), _random(2, 2, 7)
    return {"Q": Q, "K": K, "V": V, "beta": torch.tensor(0.6, dtype=torch.float64)}


def output(answer: str) -> None:
    """H, for Q (d×n), K (d×m), V (t×m) and the scale beta."""
    names = _columns()
    mistakes = [
        ("V @ softargmax(K.T @ Q)", "the scale beta is missing"),
        (
            "V @ softmax(beta * K.T @ Q)",
            "softmax acts on rows here: a query's weights are a column",
        ),
        ("V @ (beta * K.T @ Q)", "there is no softargmax: the scores are not weights yet"),
    ]
    _check(Question("H", "V @ softargmax(beta * K.T @ Q)", names, mistakes), answer)


def identity(answer: str) -> None:
    """A, so that H = V A is V itself; n is the number of columns, I and ones are n×n."""
    n = 4
    names = {
        "I": torch.eye(n, dtype=torch.float64),
        "ones": torch.ones(n, n, dtype=torch.float64),
        "n": torch.tensor(float(n), dtype=torch.float64),
    }
    mistakes = [
        ("ones/n", "then every column of H is the mean of all values"),
        ("ones", "a column of weights adds up to 1; and this one mixes all values"),
        ("softargmax(I)", "softargmax(I) has no zeros: its diagonal is e/(e + n - 1)"),
    ]
    _check(Question("A, to keep every value", "I", names, mistakes), answer)


def permuting(answer: str) -> None:
    """Q, so that H = V P for orthonormal columns K: in K, P and a large beta."""
    K = torch.linalg.qr(_random(3, 5, 5))[0]
    P = torch.eye(5, dtype=torch.float64)[:, [3, 0, 4, 2, 1]]
    beta = torch.tensor(60.0, dtype=torch.float64)
    mistakes = [
        ("0 * K", "scores of zero give every column the mean of all values"),
        ("beta * K", "these queries find their own keys: that is the identity"),
        ("K @ P", "the right keys, but not sharp: multiply by a large beta"),
        ("beta * P @ K", "P acts on the columns of K: it stands on the right"),
        ("beta * K @ P.T", "that is the permutation backwards"),
    ]
    names = {"K": K, "P": P, "beta": beta}

    def found(Q: Tensor) -> Tensor:
        if Q.shape != K.shape:
            raise ValueError(f"its shape is {tuple(Q.shape)}, but Q is as K, {tuple(K.shape)}")
        return attention_weights(Q.mT, K.mT, beta=1.0).mT

    _check(Question("Q, to permute", "beta * K @ P", names, mistakes, found), answer)


def running(answer: str) -> None:
    """H, for A = I and values W X: a linear layer that runs over the columns of X."""
    names = {"X": _random(4, 5, 7), "W": _random(5, 3, 5)}
    mistakes = [("W @ X @ softargmax(X.T @ X)", "that is with weights; here A = I")]
    _check(Question("H, for A = I", "W @ X", names, mistakes), answer)


def moved(answer: str) -> None:
    """How far h moves, to first order, when a key of weight a changes its score by delta."""
    numbers = {"beta": 0.7, "a": 0.3, "delta": 0.01}
    names = {name: torch.tensor(x, dtype=torch.float64) for name, x in numbers.items()}
    names |= {"v": _random(6, 3), "h": _random(7, 3)}
    mistakes = [
        ("beta * a * delta * v", "the other weights shrink: h moves toward v, by a share of v - h"),
        ("beta * delta * (v - h)", "a key of little weight moves h little: a is missing"),
        ("a * delta * (v - h)", "the scale beta is missing"),
        ("beta * a * delta * (h - v)", "the wrong way: h moves toward v"),
        ("beta * a * (1 - a) * delta * (v - h)", "a (1 - a) is the change of the weight itself; h "
        "changes by that over 1 - a"),
    ]  # fmt: skip
    _check(Question("the change of h", "beta * a * delta * (v - h)", names, mistakes), answer)


def masked(answer: str) -> None:
    """What is added to the score of a key that comes later than its query."""
    mistakes = [
        ("0", "0 changes nothing: it stands where a query may attend"),
        ("inf", "then the forbidden key gets all the weight"),
        ("-1", "a forbidden key still gets some weight: e^-1"),
        ("1", "a forbidden key gets more weight then"),
    ]
    _check(Question("the mask above the diagonal", "-inf", {}, mistakes), answer)


# Counting


def multiplications(answer: str) -> None:
    """Multiplications of Q Kᵀ and of A V together."""
    names = _sizes("n_q", "n_k", "d_k", "d_v")
    mistakes = [
        ("n_q * n_k * d_k", "that is Q Kᵀ; the product with V is missing"),
        ("n_q * n_k * d_v", "that is A V; the product Q Kᵀ is missing"),
        ("n_q * n_k * d_k * d_v", "the two products come one after the other: add their counts"),
        ("n_q * n_k * (d_k + d_v - 2)", "a sum of d products has d multiplications"),
    ]
    _check(Question("multiplications", "n_q * n_k * (d_k + d_v)", names, mistakes), answer)


def additions(answer: str) -> None:
    """Additions of Q Kᵀ."""
    names = _sizes("n_q", "n_k", "d_k")
    mistakes = [
        ("n_q * n_k * d_k", "to add up d_k numbers takes d_k - 1 additions"),
        ("n_q * n_k", "each entry is a sum of d_k products"),
    ]
    _check(Question("additions of Q Kᵀ", "n_q * n_k * (d_k - 1)", names, mistakes), answer)


def parameters(answer: str) -> None:
    """Parameters of self-attention of width d with h heads, without biases."""
    names = _sizes("d", "h")
    mistakes = [
        ("3 * d**2", "W_O is forgotten"),
        ("4 * h * d**2", "the width is divided among the heads"),
        ("3 * h * d**2", "the width is divided among the heads, and W_O is forgotten"),
    ]
    _check(Question("parameters", "4 * d**2", names, mistakes), answer)


def convolution(answer: str) -> None:
    """Multiplications of a convolution of kernel k over n positions of width d, all channels."""
    names = _sizes("k", "n", "d")
    mistakes = [
        ("k * n * d", "that is a depthwise convolution; here every output reads all d channels"),
        ("n * d**2", "every output reads k positions"),
    ]
    _check(Question("a convolution", "k * n * d**2", names, mistakes), answer)
