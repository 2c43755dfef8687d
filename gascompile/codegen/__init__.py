"""Segments of a plan become compiled kernels; native libraries are built and kept."""
