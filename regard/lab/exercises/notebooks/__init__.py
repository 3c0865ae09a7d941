"""Notebooks to fill in, solved; `regard.lab.exercise` takes the solutions out."""
