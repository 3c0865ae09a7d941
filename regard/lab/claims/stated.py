"""What no computation here can settle: history, opinion, and what others have built.

Each has the words of what is said and the source that settles it, with its number on arXiv where
it has one. Of some items a part is computed and a part is here; together with the experiments
these account for every one.
"""

from typing import NamedTuple

ITEMS = 103
"""How many items there are, counted from 1."""


class Stated(NamedTuple):
    """An item, or the part of one, that is only said."""

    item: int
    words: str
    """What is said, in a sentence of our own."""
    source: str
    """What settles it, and how."""


STATED: tuple[Stated, ...] = (
    Stated(
        30,
        "Cross-attention joins two modalities, such as a text prompt and an image's features.",
        "So it is in latent diffusion (Rombach et al. 2021, arXiv 2112.10752), in Flamingo "
        "(Alayrac et al. 2022, arXiv 2204.14198) and in Whisper, for speech (Radford et al. 2022, "
        "arXiv 2212.04356).",
    ),
    Stated(
        53,
        "Transformers differ from RNNs and LSTMs by having no recurrence, by training in parallel, "
        "and by being encoders with decoders.",
        "The first two are right. Encoder and decoder are older: recurrent networks had them in "
        "2014 (Sutskever et al., arXiv 1409.3215; Cho et al., arXiv 1406.1078).",
    ),
    Stated(
        71,
        "Vision Transformers are wider because images contain more information than text.",
        "No paper gives that reason. The widths are of the same range: 512 and 1024 (Vaswani et "
        "al. 2017, arXiv 1706.03762, table 3) beside 768, 1024 and 1280 (Dosovitskiy et al. 2020, "
        "arXiv 2010.11929, table 1, where B and L follow BERT, arXiv 1810.04805).",
    ),
    Stated(
        77,
        "Recurrent networks work step by step, see only the past, are hard to train and hard to "
        "transfer.",
        "Seeing only the past is a choice: bidirectional ones read both ways (Schuster and Paliwal "
        "1997), and ELMo transferred them (Peters et al. 2018, arXiv 1802.05365). Why training is "
        "hard: Pascanu et al. 2012, arXiv 1211.5063.",
    ),
    Stated(
        80,
        "In a sentence, words depend on others at distances that vary.",
        "An observation about language; treebanks measure it (Futrell et al. 2015, Large-scale "
        "evidence of dependency length minimization in 37 languages, PNAS).",
    ),
    Stated(
        81,
        "Attention was first used for image captions and then for translation.",
        "The other way round: translation in September 2014 (Bahdanau et al., arXiv 1409.0473), "
        "captions in February 2015 (Xu et al., arXiv 1502.03044).",
    ),
    Stated(
        99,
        "Transformers are encoders with decoders, transfer well, need fewer parameters, and are "
        "the backbone of chat models and of models for several modalities.",
        "Chat models have decoders alone (Brown et al. 2020, arXiv 2005.14165). Fewer parameters "
        "is more than anybody showed: the first Transformers had 65 and 213 million (arXiv "
        "1706.03762), and later ones have many times more.",
    ),
    Stated(
        103,
        "Both coding assignments, multi-head attention and a ViT, are notebooks to fill in.",
        "Tasks, not statements: `regard lab exercise multihead` and `regard lab exercise vit` "
        "write them, with checks that say what is wrong and where.",
    ),
)
