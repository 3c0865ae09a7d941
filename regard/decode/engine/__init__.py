"""How a step of decoding is computed: `pick.py` says which engines there are."""
