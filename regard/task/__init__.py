"""Tasks: what a model is trained for, each in one file, and what a trained one is used for."""
