"""A Transformer with 8-bit weights on a CPU."""
