"""What runs around an optimizer's ``step`` in eager, and would not where a plan updates."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch._C._dynamo.guards import dict_version
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from gascompile.capture.fingerprint.code_origin import origin_of_code
from gascompile.core.errors import UnsupportedOpError

_ROOT = __name__.partition(".")[0]
_libraries_own: dict[str, int] = {}
"""The versions of globals of modules in which all functions were the library's; each step looks."""


def require_own_step(optimizer: torch.optim.Optimizer) -> None:
    """Refuse hooks of this optimizer or of all, and another ``step`` in the place of the library's.

    Raises:
        UnsupportedOpError: says what to take away.
    """
    kind = type(optimizer)
    of_all = (*_global_optimizer_pre_hooks.values(), *_global_optimizer_post_hooks.values())
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    # One of ours refuses torch's own step while a planned one is open.
    if own or any(getattr(h, "__module__", "").partition(".")[0] != _ROOT for h in of_all):
        whose = f"the {kind.__name__} has" if own else "all optimizers have"
        raise UnsupportedOpError(
            f"{whose} step hooks, which a planned step does not call; remove them, or pass unplanned_optimizer=True"
        )
    step: Any = vars(optimizer).get("step")
    # Schedulers wrap it, to see that it has been called.
    is_wrapped = hasattr(step, "_wrapped_by_lr_sched") and step.__wrapped__ is kind.step
    if step is not None and not is_wrapped:
        raise UnsupportedOpError(
            f"step of the {kind.__name__} has been replaced, and a planned step does not call it; take that away by "
            "`del optimizer.step`, or pass unplanned_optimizer=True"
        )
    space = vars(sys.modules[kind.__module__])
    version = dict_version(space)
    parts: dict[str, Any] = {f"{kind.__name__}.step": kind.step}
    if _libraries_own.get(kind.__module__) != version:
        parts |= space
    for name, part in parts.items():
        if any(not origin_of_code(function).versioned for function in _with_wrapped(part)):
            raise UnsupportedOpError(
                f"{name} of {kind.__module__} has been replaced, and a planned step does not call it; put the "
                "library's back, or pass unplanned_optimizer=True"
            )
    _libraries_own[kind.__module__] = version


def _with_wrapped(function: Any) -> Iterator[types.FunctionType]:
    """Yield a function and those that it wraps."""
    while isinstance(function, types.FunctionType):
        yield function
        function = vars(function).get("__wrapped__")
