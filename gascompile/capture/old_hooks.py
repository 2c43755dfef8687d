"""Old hooks: parts of torch that compute a weight anew before each call and keep it as an attribute of the layer."""

from __future__ import annotations

from torch import nn


def old_hook(model: nn.Module) -> str:
    """Return in a sentence what hook a part of the model has, and what to use in its place; nothing without one."""
    for name, module in model.named_modules():
        for hook in module._forward_pre_hooks.values():
            if instead := _instead(hook):
                where = f"'{name}'" if name else "the model"
                return f"{where} has a hook of {instead}"
    return ""


def _instead(hook: object) -> str:
    # Most models have no hook, and then these parts of torch are not loaded.
    from torch.nn.utils.prune import BasePruningMethod
    from torch.nn.utils.spectral_norm import SpectralNorm
    from torch.nn.utils.weight_norm import WeightNorm

    if isinstance(hook, WeightNorm):
        return "torch.nn.utils.weight_norm: use torch.nn.utils.parametrizations.weight_norm"
    if isinstance(hook, SpectralNorm):
        return "torch.nn.utils.spectral_norm: use torch.nn.utils.parametrizations.spectral_norm"
    if isinstance(hook, BasePruningMethod):
        return (
            "torch.nn.utils.prune: call prune.remove, or register the mask by "
            "torch.nn.utils.parametrize.register_parametrization to go on training with it"
        )
    return ""
