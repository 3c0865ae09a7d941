"""Statements that no computation can settle: history, opinion, and what others have built.

Each has the statement and the source that settles it, with its arXiv number. Where only a part of
an item is of that kind, the part is named, and the rest is an experiment. Together with the
experiments these account for every item.
"""

from typing import NamedTuple

from regard.lab.experiment import Verdict
from regard.lab.place import Place

ITEMS = 108
"""The number of items."""


class Stated(NamedTuple):
    """An item, or a part of one, that is only stated."""

    item: int
    part: str
    """The part of the item, where the rest is computed; otherwise empty."""
    place: Place
    """Where it is stated."""
    words: str
    """The statement, in our own words."""
    source: str
    """What settles it, and how."""
    verdict: Verdict
    """What the source says of it."""


STATED: tuple[Stated, ...] = (
    Stated(
        30,
        "examples",
        Place("sheet", "6-2(a)"),
        "Cross-attention often brings modalities together, as text prompts and image features in "
        "Stable Diffusion.",
        "So it is in latent diffusion (Rombach et al. 2021, arXiv 2112.10752) and in Flamingo "
        "(Alayrac et al. 2022, arXiv 2204.14198); in Whisper it joins text to speech (Radford et "
        "al. 2022, arXiv 2212.04356).",
        "holds",
    ),
    Stated(
        53,
        "history",
        Place("homework", "1.4(a)"),
        "Among the differences from earlier sequence-to-sequence models: the Transformer is an "
        "encoder-decoder architecture.",
        "It is, but that is no difference: recurrent networks had encoder and decoder in 2014 "
        "(Sutskever et al., arXiv 1409.3215; Cho et al., arXiv 1406.1078).",
        "true in context, to be said more exactly",
    ),
    Stated(
        71,
        "reason",
        Place("homework", "1.5(b)"),
        "ViT's embeddings are larger because images contain more information than text.",
        "No paper gives that reason: the widths of ViT's B and L follow BERT, a model of text "
        "(Dosovitskiy et al. 2020, arXiv 2010.11929, table 1; arXiv 1810.04805).",
        "wrong as stated",
    ),
    Stated(
        77,
        "training",
        Place("handout", "RNNs"),
        "Training recurrent networks is tricky, and how to do transfer learning with them "
        "efficiently is left as a question.",
        "Why training is hard: Pascanu et al. 2012, arXiv 1211.5063. Transfer is possible: ELMo is "
        "recurrent and reads both ways (Peters et al. 2018, arXiv 1802.05365).",
        "holds",
    ),
    Stated(
        80,
        "",
        Place("handout", "fixed positions"),
        "In a sentence, the distances between words that depend on each other vary: the verb does "
        "not always follow its subject.",
        "An observation about language; treebanks measure it (Futrell et al. 2015, Large-scale "
        "evidence of dependency length minimization in 37 languages, PNAS).",
        "holds",
    ),
    Stated(
        81,
        "",
        Place("handout", "history"),
        "Attention was originally motivated by image captioning, and then quickly adapted to words "
        "in sentences.",
        "The other way round: translation in September 2014 (Bahdanau et al., arXiv 1409.0473), "
        "captions in February 2015 (Xu et al., arXiv 1502.03044), who refer to it.",
        "wrong as stated",
    ),
    Stated(
        99,
        "use",
        Place("handout", "take-away: Transformers"),
        "Transformers are the backbone of networks such as ChatGPT, and of any method that handles "
        "several modalities.",
        "Of chat models they are, with the decoder alone (Brown et al. 2020, arXiv 2005.14165). Of "
        "most multi-modal methods today, not of any: CLIP's image encoder may be a ResNet (Radford "
        "et al. 2021, arXiv 2103.00020).",
        "true in context, to be said more exactly",
    ),
    Stated(
        103,
        "",
        Place("sheet", "6-1"),
        "Both coding assignments, multi-head attention here and a ViT in the homework, are "
        "notebooks to fill in.",
        "Tasks, not statements: `regard lab exercise multihead` and `regard lab exercise vit` "
        "write them, with checks that say what is wrong and where.",
        "holds",
    ),
)
