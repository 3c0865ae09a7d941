"""The machine that Regard runs on: files, devices, memory, processes, threads, the shell."""

GC_THRESHOLD = 100_000
"""New objects between two garbage collections in commands and servers; Python's default is 700.
Responses and waiting requests are many small objects without cycles."""
