"""Decoding: greedy search, beam search and sampling, over engines that compute the steps."""
