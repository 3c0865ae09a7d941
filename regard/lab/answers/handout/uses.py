"""The handout on what attention is used for: two modalities, several heads, what to remember."""

import torch
from torch import Tensor

from regard import MultiHeadAttention, SinusoidalPositions, attend, attention_weights, causal
from regard.lab.answers.answer import Answer, Demonstration, Mistake, Point, Step
from regard.lab.claims.costs import cost
from regard.lab.claims.sample import SAME, D, alive, apart, normal, parameters
from regard.lab.cost.layers import Sizes
from regard.lab.place import Place

# Two modalities, and the exercise

FRAMES, WORDS = 23, 7


def _audio_and_text() -> tuple[Tensor, Tensor, Tensor]:
    return normal(0, FRAMES, 5), normal(1, WORDS, 5), normal(2, WORDS, 3)


def _fused() -> Demonstration:
    audio, key, value = _audio_and_text()
    out = attend(audio, key, value)
    return Demonstration(
        out.shape == (FRAMES, 3),
        {
            "frames of audio, which ask": FRAMES,
            "words, which answer": WORDS,
            "rows and columns of the output": list(out.shape),
            "weights of a frame add up to": float(attention_weights(audio, key)[0].sum()),
        },
    )


def _as_long() -> Demonstration:
    rows = [attend(normal(0, n, 5), *_audio_and_text()[1:]).shape[0] for n in (3, 7, 50)]
    return Demonstration(
        rows == [WORDS] * 3,
        {f"rows for 3, 7 and 50 frames over {WORDS} words": rows},
    )


def _together() -> Demonstration:
    query, key, value = _audio_and_text()
    before = attend(query, key, value)
    orders = {
        "reversed": torch.arange(WORDS - 1, -1, -1),
        "shifted": torch.arange(WORDS).roll(2),
        "shuffled": torch.tensor([3, 0, 6, 2, 5, 1, 4]),
    }
    moved = {n: apart(attend(query, key[o], value[o]), before) for n, o in orders.items()}
    return Demonstration(
        max(moved.values()) < SAME,
        {f"keys and values {name} together: the output changes by": x for name, x in moved.items()},
    )


def _keys_alone() -> Demonstration:
    query, key, value = _audio_and_text()
    change = apart(attend(query, key.flip(0), value), attend(query, key, value))
    return Demonstration(change < SAME, {"the keys alone reversed: the output changes by": change})


def _under_a_mask() -> Demonstration:
    query, key, value = normal(0, WORDS, 5), *_audio_and_text()[1:]
    change = apart(
        attend(query, key.flip(0), value.flip(0), mask=causal()),
        attend(query, key, value, mask=causal()),
    )
    return Demonstration(
        change < SAME, {"under a causal mask, both reversed: the output changes by": change}
    )


# Heads


def _two_heads() -> MultiHeadAttention:
    """The handout's example, for inputs of width 8."""
    return alive(MultiHeadAttention(8, 2, key_width=2, value_width=3), 1)


def _keras() -> Demonstration:
    layer, x = _two_heads(), normal(2, 5, 8)
    seen: list[Tensor] = []
    layer.output.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    out = layer(x)
    matrices = layer.query, layer.key, layer.value, layer.output
    return Demonstration(
        seen[0].shape[-1] == 6 and out.shape == (5, 8),
        {
            "numbers side by side, 2 heads of values of 3": seen[0].shape[-1],
            "numbers of the output, after W_O": out.shape[-1],
            "entries of W_Q, W_K, W_V of both heads, and of W_O": [
                part.weight.numel() for part in matrices
            ],
        },
    )


def _concatenated_only() -> Demonstration:
    layer, x = _two_heads(), normal(2, 5, 8)
    width = layer(x).shape[-1]
    return Demonstration(
        width == 6 and parameters(layer.output) == 0,
        {
            "width of the output": width,
            "width of the heads side by side": 6,
            "parameters of the output projection": parameters(layer.output),
        },
    )


# What to remember


def _score(position: int, distance: int, encoded: bool) -> float:
    """The score of one word for another, at a position and a distance."""
    x = normal(3, D).repeat(20, 1)
    x[position], x[position + distance] = normal(1, D), normal(2, D)
    x = SinusoidalPositions(D)(x) if encoded else x
    layer = alive(MultiHeadAttention(D, 1), 4)
    return float(layer.query(x)[position] @ layer.key(x)[position + distance])


def _remembered() -> Demonstration:
    spread = {
        encoded: {_score(0, 1, encoded), _score(0, 9, encoded), _score(8, 5, encoded)}
        for encoded in (False, True)
    }
    pairs = [cost("attention alone", Sizes(n, 8, heads=1)).multiply_adds for n in (16, 32, 64)]
    steps = [cost("attention alone", Sizes(n, 8, heads=1)).steps for n in (16, 32, 64)]
    return Demonstration(
        max(spread[False]) - min(spread[False]) < SAME
        and max(spread[True]) - min(spread[True]) > 0.01
        and pairs == [pairs[0], 4 * pairs[0], 16 * pairs[0]]
        and len(set(steps)) == 1,
        {
            "score of the same two words at three places, spread without positions": max(
                spread[False]
            )
            - min(spread[False]),
            "with sinusoids added": max(spread[True]) - min(spread[True]),
            "multiply-adds for 16, 32 and 64 tokens": pairs,
            "products one after the other": steps,
        },
    )


def _nothing_to_train() -> Demonstration:
    layer = MultiHeadAttention(D, 1)
    return Demonstration(
        parameters(layer) == 0,
        {
            "parameters of attention itself": parameters(layer.core),
            "of self-attention, with its projections": parameters(layer),
        },
    )


ANSWERS: tuple[Answer, ...] = (
    Answer(
        Place("handout", "multi-modal"),
        question="How does attention combine audio and text?",
        answer="By cross-attention: queries from the audio, keys and values from the text, "
        r"$\operatorname{Attention}(Q_{\text{audio}}, K_{\text{text}}, V_{\text{text}})$. Each "
        "frame takes the mean of the words by its own weights. The two need not be equally long, "
        "nor aligned: the scores find what belongs together.",
        derivation=(
            Step(
                "The output has a row for each frame of audio.",
                r"(L_q \times d_k)(d_k \times L_k)(L_k \times d_v) = L_q \times d_v",
            ),
        ),
        run=_fused,
        mistakes=(
            Mistake(
                "Both sequences must have the same length, or the output has the text's.",
                "There is an output for every query, that is, for every frame.",
                _as_long,
            ),
        ),
        points=(
            Point(1, "queries from one, keys and values from the other"),
            Point(1, "lengths may differ"),
        ),
    ),
    Answer(
        Place("handout", "exercise"),
        question="Show that attention gives the same output when keys and values are shifted or "
        "shuffled together.",
        answer="Each output is a sum over pairs $(k_j, v_j)$, and so is the softmax's denominator. "
        r"A sum does not depend on the order of its terms, so that a permutation $\pi$ of the "
        "pairs changes nothing.",
        derivation=(
            Step(
                r"With $k'_j = k_{\pi(j)}$ and $v'_j = v_{\pi(j)}$:",
                r"y'_i = \frac{\sum_j e^{q_i \cdot k_{\pi(j)}}\, v_{\pi(j)}}{\sum_j e^{q_i \cdot "
                r"k_{\pi(j)}}}",
            ),
            Step(
                r"With $l = \pi(j)$, which takes every value once:",
                r"y'_i = \frac{\sum_l e^{q_i \cdot k_l}\, v_l}{\sum_l e^{q_i \cdot k_l}} = y_i",
            ),
        ),
        run=_together,
        mistakes=(
            Mistake(
                "The keys may be shuffled by themselves.",
                "Then every key finds another value. They have to move as pairs.",
                _keys_alone,
            ),
            Mistake(
                "It holds under a causal mask too.",
                "A mask refers to places, and so to the order.",
                _under_a_mask,
            ),
        ),
        points=(
            Point(1, "both sums run over pairs"),
            Point(1, "renaming the index of a sum changes nothing"),
        ),
    ),
    Answer(
        Place("handout", "multi-head"),
        question="What does multi-head attention consist of, and what does the Keras example make?",
        answer="Several attentions with matrices of their own, put side by side and multiplied by "
        "$W_O$. The example has two sets $(W_Q, W_K, W_V)$ with $d_k = 2$ and $d_v = 3$: six "
        "numbers side by side, which Keras projects back to the width of the query. Loosely, "
        "heads are like filters of a convolution; layers of attention can be chained like "
        "convolutions.",
        derivation=(
            Step(
                "Two heads.",
                r"[\operatorname{head}_1; \operatorname{head}_2] \in \mathbb{R}^{L \times 6}, "
                r"\qquad y = [\operatorname{head}_1; \operatorname{head}_2]\, W_O",
            ),
        ),
        run=_keras,
        mistakes=(
            Mistake(
                "The layer simply concatenates its heads.",
                "$W_O$ is forgotten, in Keras' layer too: the output is as wide as the query, not "
                "6.",
                _concatenated_only,
            ),
        ),
        points=(Point(1, "a set of matrices for each head"), Point(1, "concatenation and $W_O$")),
    ),
    Answer(
        Place("handout", "take-away: attention"),
        question="What should one remember of attention?",
        answer="Its weights are computed from the words, not learned for positions, so that it "
        "relates words wherever they stand; meaning comes before position, unless positions are "
        "added to the input. All of it runs in parallel, at a cost that is quadratic in the "
        "length. Attention has no parameters; self-attention has those of its projections. "
        "Cross-attention joins sequences of different kinds and lengths.",
        derivation=(
            Step(
                "The score of two words depends on them alone.",
                r"s_{ij} = \frac{(W_Q^\top x_i)^\top (W_K^\top x_j)}{\sqrt{d_k}}",
            ),
        ),
        run=_remembered,
        mistakes=(
            Mistake(
                "Self-attention has no trainable parameters.",
                "Attention has none. Self-attention has its projections.",
                _nothing_to_train,
            ),
        ),
        points=(
            Point(1, "computed weights, any distance"),
            Point(1, "parallel, quadratic"),
            Point(1, "parameters in the projections"),
        ),
    ),
)
