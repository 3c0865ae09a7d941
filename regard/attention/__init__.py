"""Attention itself: the operation, its masks, positions, weights, heads and caches."""
