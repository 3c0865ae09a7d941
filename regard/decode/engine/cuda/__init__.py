"""Captured graphs on CUDA."""
