"""Decoding: from a model's step to the tokens it finds, greedily, by beams or by chance."""
