"""A copy of a module whose parameters and buffers have shapes but no bytes."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from gascompile.capture.old_hooks import old_hook
from gascompile.capture.twin_functions import TwinMemo
from gascompile.core.errors import CaptureError
from gascompile.core.signature import require_plain, strides_of


def fake_twin(model: nn.Module, *, device: str) -> tuple[nn.Module, Mapping[str, str]]:
    """Return the twin and, for every parameter and buffer name, the first name of the same tensor.

    Wherever its tensors are, the twin's are on ``device``: plans of all devices are made on one.

    Raises:
        CaptureError: the module cannot be copied.
        UnsupportedOpError: a parameter or buffer is of a kind that no plan can have.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    memo = TwinMemo(model)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if id(tensor) not in memo:
            require_plain(tensor, f"'{name}'")
            memo[id(tensor)] = _fake(mode, tensor, device)
    try:
        twin = copy.deepcopy(model, memo)
    except Exception as error:  # whatever the classes of its attributes raise when they are copied
        advice = old_hook(model) or (
            "remove the attribute that does not support copy.deepcopy, or give its class a __deepcopy__"
        )
        raise CaptureError(
            f"{type(model).__name__} cannot be copied for tracing ({type(error).__name__}: {error}); {advice}"
        ) from error
    return twin.requires_grad_(False), canonical_names(model)


def canonical_names(model: nn.Module) -> dict[str, str]:
    """Return, for every parameter and buffer name, the first name of the same tensor."""
    first: dict[int, str] = {}
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}


def _fake(mode: FakeTensorMode, tensor: torch.Tensor, device: str) -> torch.Tensor:
    with mode:
        # As it lies in the model: the runtime lays it out so, too.
        fake = torch.empty_strided(
            tensor.shape, strides_of(tensor), dtype=tensor.dtype, device=device
        )
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=False)
    return fake
