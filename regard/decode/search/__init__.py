"""Search algorithms, and their constraints, as data and pure functions."""
