"""The GPU of this machine, where there is one: what benchmarks wait for and count; elsewhere the processor."""

from __future__ import annotations

import torch


def has_gpu() -> bool:
    """Return whether there is a GPU to measure."""
    return torch.cuda.is_available()


def device_here() -> torch.device:
    """Return the GPU, or the processor where there is none."""
    return torch.device("cuda" if has_gpu() else "cpu")


def finish() -> None:
    """Wait until the GPU has done all that it was given."""
    if has_gpu():
        torch.cuda.synchronize()


def reset_peak() -> None:
    """Give free memory back and count the most from now on."""
    if has_gpu():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
