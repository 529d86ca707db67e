"""Triton kernels of the decode step. Each has a torch counterpart of the same meaning, which is what runs on a CPU."""
