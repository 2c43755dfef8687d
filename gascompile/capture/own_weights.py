"""Own weights: constants of a trace that are the model's parameters or buffers after all.

Code may reach the model past its twin: by a global variable, or an object that is not copied with it. What it reads is
a tensor of the model as any other then, and no constant of the program.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from gascompile.capture.fake_twin import canonical_names


def own_weights(constants: Mapping[str, object], model: nn.Module) -> dict[str, str]:
    """Return the first name in the model of every constant that is a parameter or buffer of it, by its own name."""
    if not constants:
        return {}
    named = canonical_names(model)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    places = {_place(tensor): named[name] for name, tensor in tensors.items()}
    places.pop(None, None)
    return {
        name: places[place]
        for name, value in constants.items()
        if isinstance(value, torch.Tensor) and (place := _place(value)) in places
    }


def _place(tensor: torch.Tensor) -> Hashable | None:
    """Return where a tensor lies and how, or ``None`` for one without values."""
    if isinstance(tensor, FakeTensor) or tensor.is_meta or not tensor.numel():
        return None
    where = tensor.untyped_storage().data_ptr(), tensor.storage_offset()
    return tensor.device, *where, tensor.dtype, tensor.shape, tensor.stride()
