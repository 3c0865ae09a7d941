"""C++ kernels for CPUs, each beside the Python that calls it, and what they share."""
