"""Trace errors: what went wrong in a trace, said of the user's code."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException


def in_words(error: Exception, model: str) -> str:
    """Return what went wrong, where in the user's code, and the way out."""
    reason = str(error).split("\n\n", maxsplit=1)[0] or type(error).__name__
    if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        reason = (
            f"it depends on values of tensors ({reason}), by .item(), by an if or a loop over them, or by a mask as "
            "an index; write it with torch.where, so that the same ops run at every step"
        )
    if "must not already be a functional tensor" in reason:
        reason = "tensor.set_(value) gives a tensor other memory; write tensor.copy_(value)"
    if "Unexpected fake buffer" in reason:
        reason = (
            "it keeps a tensor that it computes, in a table, a cache or an attribute, and reads it in later calls; "
            "call loss_fn(model, batch) once before, for each kind of batch, so that it is there, or compute it anew"
        )
    if "tracing_context.fake_mode must not be None" in reason:
        # AOTAutograd makes them anew from the memory that they share, for which it asks a context.
        reason = "it changes a tensor of its batch in place, with which others share memory; let it change a clone"
    return f"cannot trace the loss of {model}{_place(error)}: {reason}"


def _place(error: BaseException) -> str:
    """Return the innermost line of the traceback that is neither torch's nor ours."""
    ours = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))
    lines = [
        f" at {frame.filename}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((*ours, "<"))
    ]
    return lines[-1] if lines else ""
