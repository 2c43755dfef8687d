"""Recorders: hooks by which models of transformers return what their layers compute, such as hidden states.

The library sets them at the first call that asks for such results. A plan computes the same at each call, so they are
there before one is captured.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

_SET = "_output_capturing_hooks_installed"
"""What the library sets on a model, and on all models in it, with their hooks."""


def set_recorders(model: nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Set the hooks that a call needs, as the call itself would; nothing for a call that asks for none.

    Args:
        model: of any library.
        kwargs: of the call.
    """
    library = sys.modules.get("transformers.utils.output_capturing")
    if library is None:
        return
    is_asked = any(name.startswith("output_") and value for name, value in kwargs.items())
    for part in _recording(model, library.__file__ or ""):
        names = {f"output_{kind}" for kind in _recorded(library, part)}
        if is_asked or any(getattr(part.config, name, False) for name in names):
            library.maybe_install_capturing_hooks(part)


def _recorded(library: Any, model: Any) -> Mapping[str, Any]:
    """Return what a model can record, by its name; the register is asked by class up to 5.17, by model later."""
    register = library._CAN_RECORD_REGISTRY
    return register.get(str(type(model))) or register.get(model) or {}


def _recording(module: nn.Module, file: str) -> Iterator[Any]:
    """Give the outermost modules whose calls record: they set the hooks of all models within."""
    if getattr(module, _SET, False):
        return
    function: Any = type(module).forward
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is not None and code.co_filename == file:
            yield module
            return
        function = getattr(function, "__wrapped__", None)
    for part in module.children():
        yield from _recording(part, file)
