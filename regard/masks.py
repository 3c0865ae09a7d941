"""The masks of attention under one name: `regard.masks.causal() & regard.masks.packed(lengths)`.

Every mask answers True where a query may attend to a key, and masks combine by `&`, `|` and `~`.
They are defined in `regard/attention/mask.py`.
"""

from regard.attention.mask import Mask, causal, documents, packed, padding, prefix, window

__all__ = ["Mask", "causal", "documents", "packed", "padding", "prefix", "window"]
