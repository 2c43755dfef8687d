"""Load hooks: a model's own code that ``load_state_dict`` runs, and what reads checkpoints in place does not."""

from __future__ import annotations

import functools
import types

from torch import nn

from gascompile.capture.fingerprint.code_origin import origin_of_code, origin_of_name
from gascompile.core.errors import CheckpointError

_METHODS = ("_load_from_state_dict", "load_state_dict", "set_extra_state")
_HOOKS = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")


def require_no_load_hooks(model: nn.Module) -> None:
    """Return if nothing of the program's has a say in how the model's weights are loaded.

    What libraries do there, torch's own layers among them, is for names of older versions.

    Raises:
        CheckpointError: names the module and what it has.
    """
    for path, module in model.named_modules():
        found = [
            name
            for name in _METHODS
            if _is_own(vars(module).get(name) or getattr(type(module), name))
        ]
        found += [name for name in _HOOKS if any(map(_is_own, getattr(module, name, {}).values()))]
        if found:
            where = (
                f"'{path}', a {type(module).__qualname__}," if path else type(module).__qualname__
            )
            raise CheckpointError(
                f"{where} has its own code for loading weights ({found[0]}), which checkpoint= does not run; load the "
                "weights by model.load_state_dict first, then compile without checkpoint="
            )


def _is_own(hook: object) -> bool:
    """Return whether a function that torch calls, by whatever it is wrapped in, is the program's."""
    inner = getattr(hook, "hook", hook)  # torch keeps some hooks in an object
    while isinstance(inner, (functools.partial, types.MethodType)):
        inner = inner.func if isinstance(inner, functools.partial) else inner.__func__
    if isinstance(inner, types.FunctionType):
        return not origin_of_code(inner).versioned
    if isinstance(inner, types.BuiltinFunctionType):
        return False
    return not origin_of_name(type(inner).__module__).versioned
