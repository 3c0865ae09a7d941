"""Ours beside the peers, in one run. `python -m bench` prints the tables for this machine."""
