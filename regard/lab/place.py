"""Where something is taught: one of the five course documents, and the question or section in it.

Questions are called as they are printed, 1.1(c). Slides and handout have no numbers; their sections
have short names of our own.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

Document: TypeAlias = Literal["exercises", "slides", "sheet", "homework", "handout"]
"""A course document, by the word that one types."""

TITLES: dict[Document, str] = {
    "exercises": "worked exercises",
    "slides": "slides",
    "sheet": "exercise sheet",
    "homework": "homework",
    "handout": "handout",
}

SECTIONS: dict[Document, dict[str, str]] = {
    "exercises": {
        "1": "dot-product attention of one vector over three",
        "2": "attention in Transformers: the formula",
        "2(a)": "the direction of the softmax, and a shape",
        "2(b)": "the scale, and why it is needed",
        "2(c)": "the number of operations",
        "2(d)": "the mask",
        "3": "scaled dot-product attention by hand",
    },
    "slides": {
        "dense layer": "one dense layer over all tokens",
        "shared weights": "parameters and cost of attention",
        "order": "permutations, and why order is needed",
        "positions": "positions beside the tokens, or added to them",
        "adding": "whether adding positions corrupts the data",
        "sinusoids": "the formula of the positions",
        "encoder": "the encoder, and its residual connections",
        "decoder": "the decoder's attention",
    },
    "sheet": {
        "6-1": "multi-head attention as a program",
        "6-2(a)": "self-attention and cross-attention",
        "6-2(b)": "which layers of the figure are which",
        "6-2(c)": "positional encodings",
        "6-2(d)": "the cost of three kinds of layers",
        "6-2(e)": "long sequences",
    },
    "homework": {
        "1.1(a)": "the output of attention",
        "1.1(b)": "what β does, and a convenient one",
        "1.1(c)": "preserving a value",
        "1.1(d)": "spreading over the values",
        "1.1(e)": "a small change of one key",
        "1.1(f)": "a longer key",
        "1.2(a)": "the output of multi-head attention",
        "1.2(b)": "multi-head attention and convolutions",
        "1.3(a)": "multi-head self-attention",
        "1.3(b)": "when positions are needed",
        "1.3(c)": "self-attention as identity or permutation",
        "1.3(d)": "self-attention as a running linear layer",
        "1.3(e)": "self-attention as a wider convolution",
        "1.4(a)": "Transformers and recurrent networks",
        "1.4(b)": "self-attention, and why it matters",
        "1.4(c)": "multi-head attention, and what it is good for",
        "1.4(d)": "the feed-forward network",
        "1.4(e)": "layer normalisation",
        "1.5(a)": "ViT and convolutional networks",
        "1.5(b)": "ViT and the original Transformer",
        "1.5(c)": "positions in ViT",
        "1.5(d)": "how ViT classifies",
        "2": "a ViT as a program",
    },
    "handout": {
        "RNNs": "limits of recurrent networks",
        "CNNs": "limits of convolutional networks",
        "fixed positions": "what convolutional and dense layers tie their weights to",
        "larger networks": "learning every dependency graph",
        "history": "where attention comes from",
        "motivation": "a recipe for the weights",
        "scores": "one query, its scores and its weights",
        "three tensors": "queries, keys and values, and their shapes",
        "three steps": "score, softmax, weighted mean",
        "complexity": "the cost and the parameters of attention itself",
        "self-attention": "three projections of one input",
        "Numpy example": "self-attention of four words",
        "cost table": "the cost of four kinds of layers",
        "parameter table": "the parameters of four kinds of layers",
        "multi-modal": "cross-attention of audio and text",
        "exercise": "keys and values that are shifted or shuffled",
        "multi-head": "several heads",
        "take-away: attention": "what to remember of attention",
        "Transformers": "encoder and decoder",
        "positional encoding": "positions as features",
        "take-away: Transformers": "what to remember of Transformers",
    },
}
"""The sections of each document in reading order, and what each is about, in our own words."""


@dataclass(frozen=True)
class Place:
    """A section of a document."""

    document: Document
    section: str

    def __post_init__(self) -> None:
        if self.section not in SECTIONS[self.document]:
            known = ", ".join(SECTIONS[self.document])
            raise ValueError(
                f"there is no {self.section!r} in the {TITLES[self.document]}; choose from {known}"
            )

    def __str__(self) -> str:
        return f"{TITLES[self.document]}{' ' if self.numbered else ', '}{self.section}"

    @property
    def numbered(self) -> bool:
        """Whether the section has a number in the document."""
        return self.section[0].isdigit()

    @property
    def about(self) -> str:
        """What the section is about."""
        return SECTIONS[self.document][self.section]
