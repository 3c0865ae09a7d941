"""Exercises with their solutions; `regard.lab.exercise` takes the solutions out."""
