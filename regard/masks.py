"""The masks of attention under one name: which query may attend to which key.

A mask is True where a query may attend to a key. Masks combine by `&`, `|` and `~`, and
`mask.tensor(L, S)` shows one as booleans, (B, H, L, S). They are defined in
`regard/attention/mask.py`.

>>> from regard import masks
>>> mask = masks.causal() & masks.window(1)
>>> print(mask, mask.tensor(3, 3)[0, 0].int())
causal() & window(1, 1) tensor([[1, 0, 0],
        [1, 1, 0],
        [0, 1, 1]], dtype=torch.int32)
>>> masks.packed([2, 1]).tensor(3, 3)[0, 0].int()  # two sequences, end to end
tensor([[1, 1, 0],
        [1, 1, 0],
        [0, 0, 1]], dtype=torch.int32)
"""

from regard.attention.mask import Mask, causal, documents, packed, padding, prefix, window

__all__ = ["Mask", "causal", "documents", "packed", "padding", "prefix", "window"]
