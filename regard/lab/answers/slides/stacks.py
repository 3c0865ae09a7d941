"""The slides on encoder and decoder."""

import torch
from torch import Tensor, nn

from regard import MultiHeadAttention, Transformer, causal
from regard.lab.answers.answer import Answer, Demonstration, Mistake, Point, Step
from regard.lab.claims.sample import PLAN, SAME, D, L, S, alive, apart, blocks, influence, normal
from regard.lab.place import Place


def _slope(skips: bool) -> float:
    """How strongly the output of 12 layers depends on its input."""
    x = normal(0, 1, L, D).requires_grad_()
    y: Tensor = x
    for seed in range(12):
        network = alive(nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)), seed)
        changed = 0.3 * network(y)
        y = y + changed if skips else changed
    (slope,) = torch.autograd.grad(y.sum(), x)
    return float(slope.abs().mean())


def _residual() -> Demonstration:
    with_skips, without = _slope(True), _slope(False)
    model = Transformer(PLAN)
    around = [
        sum(name.startswith("add_") for name, part in block.named_children() if part is not None)
        for stack in (model.encoder, model.decoder)
        for block in blocks(stack)[:1]
    ]
    return Demonstration(
        with_skips > 0.1 and without < 1e-3 and around == [2, 3],
        {
            "residual connections in a layer of the encoder, and of the decoder": around,
            "mean slope of 12 layers, with residual connections": with_skips,
            "without": without,
        },
    )


def _one_around_all() -> Demonstration:
    """A single residual connection around the whole stack: do the layers inside learn?"""
    inner = _slope(False)
    return Demonstration(
        inner > 1e-3, {"slope from the last to the first of 12 layers inside": inner}
    )


class _Decoder:
    """A small model's decoder, and what its layers read."""

    def __init__(self) -> None:
        self.model = alive(Transformer(PLAN), 0)
        self.memory, self.x = normal(1, 1, S, D), normal(2, 1, L, D)
        self.read: list[Tensor] = []
        self.keys: list[Tensor] = []
        for block in blocks(self.model.decoder):
            cross = block.cross
            assert isinstance(cross, MultiHeadAttention)
            cross.register_forward_pre_hook(lambda _, args: self.read.append(args[1]))
            cross.core.register_forward_pre_hook(lambda _, args: self.keys.append(args[1]))

    def __call__(self, x: Tensor, memory: Tensor) -> Tensor:
        states: Tensor = self.model.decoder(x, memory, mask=causal())
        return states


def _three_inputs() -> Demonstration:
    decoder = _Decoder()
    future = influence(lambda x: decoder(x, decoder.memory), decoder.x).triu(1).max()
    source = influence(lambda m: decoder(decoder.x, m), decoder.memory).min()
    decoder.read.clear()
    rows = decoder(decoder.x, decoder.memory).shape[1]
    same = max(apart(read, decoder.memory) for read in decoder.read)
    return Demonstration(
        float(future) == 0 and float(source) > 0 and same == 0 and rows == L,
        {
            "what a later position changes in an earlier one": float(future),
            "least influence of a source position on a target position": float(source),
            "difference of what every decoder layer reads from the encoder's output": same,
            "target positions, which ask, and source positions": [rows, S],
        },
    )


def _shared_keys() -> Demonstration:
    decoder = _Decoder()
    decoder(decoder.x, decoder.memory)
    first, second = decoder.keys
    return Demonstration(
        apart(first, second) < SAME,
        {"difference between the keys of two decoder layers": apart(first, second)},
    )


def _sees_the_future() -> Demonstration:
    decoder = _Decoder()
    open_ = influence(lambda x: decoder.model.decoder(x, decoder.memory), decoder.x)
    masked = influence(lambda x: decoder(x, decoder.memory), decoder.x)
    return Demonstration(
        float(masked.triu(1).max()) > 0,
        {
            "what a later position changes in an earlier one, with the mask": float(
                masked.triu(1).max()
            ),
            "without it": float(open_.triu(1).max()),
        },
    )


ANSWERS: tuple[Answer, ...] = (
    Answer(
        Place("slides", "encoder"),
        question="What are the residual connections in the encoder for?",
        answer="Each sublayer adds to its input instead of replacing it, and the sum is "
        "normalised. Each layer of the encoder has two of them, each of the decoder three. So "
        "gradients reach the first layers unweakened, and whatever a token brought along, such as "
        "its position, is still there at the top.",
        derivation=(
            Step(
                "The derivative of a sublayer with its skip has the identity in it.",
                r"\frac{\partial (x + f(x))}{\partial x} = I + \frac{\partial f}{\partial x}",
            ),
            Step(
                "Through many layers it does not vanish, where a product of small derivatives "
                "does.",
                r"\prod_l \left(I + J_l\right) \quad \text{against} \quad \prod_l J_l",
            ),
        ),
        run=_residual,
        mistakes=(
            Mistake(
                "One skip around the whole stack does the same.",
                "Inside the stack the gradient still passes through the product of all layers.",
                _one_around_all,
            ),
        ),
        points=(
            Point(1, "around every sublayer, then LayerNorm"),
            Point(1, "purpose: gradients and information pass"),
        ),
    ),
    Answer(
        Place("slides", "decoder"),
        question="What do the decoder's two kinds of attention read?",
        answer="Its self-attention reads the target up to the position itself; later positions are "
        "masked. Its cross-attention takes queries from the layer below, and keys and values from "
        "the output of the top encoder layer. All decoder layers read the same output, and each "
        "projects keys and values of its own from it.",
        derivation=(
            Step(
                "Masked self-attention.",
                r"\operatorname{softmax}\left(\frac{Q K^\top}{\sqrt{d_k}} + M\right) V, \qquad "
                r"M_{ij} = -\infty \text{ for } j > i",
            ),
            Step(
                "Cross-attention in decoder layer $l$, with the encoder's output $E$.",
                r"Q = x^l W_Q^l, \qquad K = E W_K^l, \qquad V = E W_V^l",
            ),
        ),
        run=_three_inputs,
        mistakes=(
            Mistake(
                "The top encoder layer's keys and values are used in all decoder layers.",
                "Its output is. Each decoder layer makes keys and values of its own from it.",
                _shared_keys,
            ),
            Mistake(
                "The decoder's self-attention sees the whole target.",
                "Then it would be trained to copy the next token, which is not there when it "
                "decodes.",
                _sees_the_future,
            ),
        ),
        points=(
            Point(1, "masked self-attention"),
            Point(1, "queries from below, keys and values from the encoder's output"),
        ),
    ),
)
