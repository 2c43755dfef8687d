"""Where a Triton kernel is launched: on the tensors' device, or in Triton's interpreter on the CPU."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether kernels defined now run in the interpreter; Triton decides it where a kernel is defined."""


def launch_device(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Return the context in which a kernel on ``tensor`` is launched.

    Raises:
        ValueError: the tensor is in CPU memory, and the kernels are compiled.
    """
    if tensor.is_cuda:
        return torch.cuda.device(tensor.device)
    if not INTERPRETED:
        raise ValueError(
            f"a compiled Triton kernel cannot work on {tensor.device}; use gascompile.runtime.kernels.reference, or "
            "set TRITON_INTERPRET=1 before Triton is imported"
        )
    return nullcontext()
