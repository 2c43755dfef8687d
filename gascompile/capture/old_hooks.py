"""Old hooks: parts of torch that compute a weight anew before each call and keep it as an attribute of the layer."""

from __future__ import annotations

from torch import nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

_INSTEAD = {
    WeightNorm: "torch.nn.utils.weight_norm: use torch.nn.utils.parametrizations.weight_norm",
    SpectralNorm: "torch.nn.utils.spectral_norm: use torch.nn.utils.parametrizations.spectral_norm",
    BasePruningMethod: (
        "torch.nn.utils.prune: call prune.remove, or register the mask by "
        "torch.nn.utils.parametrize.register_parametrization to go on training with it"
    ),
}
"""By the class of the hook."""


def old_hook(model: nn.Module) -> str:
    """Return in a sentence what hook a part of the model has, and what to use in its place; nothing without one."""
    for name, module in model.named_modules():
        for hook in module._forward_pre_hooks.values():
            for kind, instead in _INSTEAD.items():
                if isinstance(hook, kind):
                    where = f"'{name}'" if name else "the model"
                    return f"{where} has a hook of {instead}"
    return ""
