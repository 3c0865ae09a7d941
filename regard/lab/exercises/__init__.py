"""Exercises: their checks, each of which knows the right answer and the usual wrong ones."""
