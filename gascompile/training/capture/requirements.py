"""Requirements: models and optimizers that a planned step would train otherwise than eager does, refused by name.

A plan holds what one process computes from a loss. What others add to that, between gradients and updates or
between processes, it would leave out without a word.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from gascompile.capture.batches import leaves_of
from gascompile.core.errors import CaptureError, UnsupportedOpError
from gascompile.core.ranks import RankLayout
from gascompile.core.signature import require_bare, require_plain

_SHARED = (
    "torch.distributed",
    "torch.nn.parallel",
    "deepspeed",
    "fairscale",
    "horovod",
    "megatron",
)
"""Packages whose modules, parameters and optimizers exchange values with other processes or devices."""
_ONE_PROCESS = "a planned step averages nothing between processes or devices; train in one process"


def prepared(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that accelerate's ``prepare`` has wrapped, or the same one.

    Raises:
        UnsupportedOpError: its wrapper scales losses, which planned steps do not.
    """
    kind = type(optimizer)
    if (kind.__module__, kind.__qualname__) != ("accelerate.optimizer", "AcceleratedOptimizer"):
        return optimizer
    wrapper: Any = optimizer
    if wrapper.scaler is not None:
        raise UnsupportedOpError(
            "accelerate has made the optimizer for losses that it scales (fp16), which planned steps do not; use "
            "Accelerator(mixed_precision='bf16')"
        )
    own: torch.optim.Optimizer = wrapper.optimizer
    return own


def require_followed(
    model: nn.Module, optimizer: torch.optim.Optimizer, layout: RankLayout | None = None
) -> None:
    """Refuse what a step of ``model`` and ``optimizer`` would leave out or cannot trace.

    Args:
        layout: of the ranks that train the model together.

    Raises:
        CaptureError: parameters without values yet.
        UnsupportedOpError: names the module, parameter or optimizer, and what to pass in its place.
    """
    require_alone(layout)
    if _is_shared(optimizer):
        raise UnsupportedOpError(
            f"the optimizer is a {type(optimizer).__name__}, which exchanges gradients or states: {_ONE_PROCESS}, with "
            "an optimizer of torch.optim"
        )
    for name, module in model.named_modules():
        where = f"'{name}'" if name else "the model"
        if _is_shared(module):
            raise UnsupportedOpError(
                f"{where} is a {type(module).__name__}: {_ONE_PROCESS}, and pass the module that it wraps "
                "(model.module)"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedOpError(
                f"{where} is a ScriptModule, which cannot be traced with its backward pass; pass the Python module "
                "that it was made from"
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        _require_plain(name, tensor)
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise UnsupportedOpError(
                f"'{name}' has a gradient hook, which a planned step does not call; remove it, or clip by max_grad_norm"
            )


def require_bare_batch(batch: Any) -> None:
    """Refuse a batch whose gradient eager would compute, with attributes that the loss may read, or not plain.

    Raises:
        UnsupportedOpError: names the tensor's shape.
    """
    for leaf in leaves_of(batch):
        if isinstance(leaf, torch.Tensor) and leaf.is_nested:
            raise UnsupportedOpError(
                "the batch has a nested tensor, which has no sizes to plan for; pad it, as by to_padded_tensor()"
            )
        if type(leaf) is torch.Tensor:
            require_plain(leaf, f"a tensor of the batch, {list(leaf.shape)},")
        if isinstance(leaf, torch.Tensor) and vars(leaf):
            require_bare(leaf, f"a tensor of the batch, {list(leaf.shape)},")
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            raise UnsupportedOpError(
                f"a tensor of the batch, {list(leaf.shape)}, requires a gradient, which a planned step does not give; "
                "pass its detach(), or compute it within loss_fn"
            )


def require_own_saves() -> None:
    """Refuse hooks around a step which change or move what its backward pass keeps.

    Raises:
        UnsupportedOpError: such hooks are on.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        raise UnsupportedOpError(
            "saved_tensors_hooks, as of save_on_cpu, are on around the step, which keeps by plan what its backward "
            "pass needs and calls none of them; call the step outside of them"
        )


def require_alone(layout: RankLayout | None = None) -> None:
    """Refuse a process that is one of several, unless they are ranks of one step.

    Raises:
        UnsupportedOpError: names their number.
    """
    if layout is not None:
        return
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return
    count = distributed.get_world_size()
    if count > 1:
        raise UnsupportedOpError(
            f"this is one of {count} processes of torch.distributed, and their models would drift apart: "
            f"{_ONE_PROCESS}, or call torch.distributed.destroy_process_group() before compile_step"
        )


def _is_shared(thing: object) -> bool:
    return any(
        base.__module__ == package or base.__module__.startswith(f"{package}.")
        for base in type(thing).__mro__
        for package in _SHARED
    )


def _require_plain(name: str, tensor: Any) -> None:
    if is_lazy(tensor):
        raise CaptureError(
            f"'{name}' has no shape yet; call the model once on a batch, or its initialize_parameters, before "
            "the optimizer and the step are made"
        )
    if _is_shared(tensor):
        raise UnsupportedOpError(
            f"'{name}' is a {type(tensor).__name__}, a part of a tensor that several processes share: {_ONE_PROCESS}, "
            "with a model of plain parameters"
        )
    if is_traceable_wrapper_subclass(tensor):
        raise UnsupportedOpError(
            f"'{name}' is a {type(tensor).__name__}, which holds other tensors; train plain float32 parameters, and "
            "convert them after close"
        )
    if tensor.layout != torch.strided or tensor.is_quantized:
        form = "quantised" if tensor.is_quantized else f"of layout {tensor.layout}"
        raise UnsupportedOpError(
            f"'{name}' is {form}; train it dense (to_dense() or dequantize()), and convert it after close"
        )
