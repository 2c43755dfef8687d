"""Refuses models and inputs whose tensors are no plain arrays of numbers, before anything reads their storage.

Sparse, nested, quantised and opaque tensors have no bytes that could be planned; compiled modules no code to trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from gascompile.core.errors import CaptureError


def require_plain_model(model: nn.Module) -> None:
    """Return if every part of ``model`` can be traced and every tensor of it planned.

    Raises:
        CaptureError: names the part or the tensor.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"{_part(name)} is a ScriptModule, whose code cannot be traced; compile the module that it was made "
                "from"
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise CaptureError(
                f"'{name}' has no shape yet; call the model once on an input like those to come, and compile it then"
            )
        if fault := _fault(tensor):
            raise CaptureError(
                f"'{name}' is {fault}, which has no place in a plan; keep a dense tensor of numbers instead"
            )


def require_plain_inputs(args: tuple[Any, ...], kwargs: Any) -> None:
    """Return if every tensor of a call is a plain one, and no module is passed; raises ``CaptureError``."""
    for path, leaf in pytree.tree_flatten_with_path((args, dict(kwargs)))[0]:
        if isinstance(leaf, nn.Module):
            raise CaptureError(
                f"the input {pytree.keystr(path)} is a {type(leaf).__name__}, whose weights a plan would not know; "
                "make it a part of the model"
            )
        if isinstance(leaf, torch.Tensor) and (fault := _fault(leaf)):
            raise CaptureError(
                f"the input {pytree.keystr(path)} is {fault}, which has no place in a plan; pass a dense tensor"
            )


def require_plain_constants(constants: Mapping[str, object]) -> None:
    """Return if every tensor that a trace found beside the model's own is a plain one; raises ``CaptureError``."""
    for name, value in constants.items():
        if isinstance(value, torch.Tensor) and (fault := _fault(value)):
            raise CaptureError(
                f"'{name}', which the model computes with, is {fault}, which has no place in a plan; keep a dense "
                "tensor instead"
            )


def _part(name: str) -> str:
    return f"the part '{name}' of the model" if name else "the model"


def _fault(tensor: torch.Tensor) -> str:
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.layout is not torch.strided:
        return f"a tensor of the layout {tensor.layout}"
    return "a quantised tensor" if tensor.is_quantized else ""
