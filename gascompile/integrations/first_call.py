"""First call: what models of transformers set on themselves at the first call of a kind.

Hooks by which they return what their layers compute, such as hidden states, and tables of positions beyond those of
their training. A plan computes the same at each call, so all that is there before one is captured.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

_SET = "_output_capturing_hooks_installed"
"""What the library sets on a model, and on all models in it, with their hooks."""


def set_at_first_call(model: nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Set the hooks and tables that a call needs, as the call itself would.

    Args:
        model: of any library.
        kwargs: of the call.
    """
    hooks = sys.modules.get("transformers.utils.output_capturing")
    if hooks is not None:
        _set_recorders(hooks, model, kwargs)
    rope = sys.modules.get("transformers.modeling_rope_utils")
    if rope is not None:
        _set_long_tables(rope, model)


def _set_recorders(library: Any, model: nn.Module, kwargs: Mapping[str, Any]) -> None:
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
    if _is_wrapped_by(type(module).forward, file):
        yield module
        return
    for child in module.children():
        yield from _recording(child, file)


def _set_long_tables(library: Any, model: nn.Module) -> None:
    """Set the table that rotary embeddings of "longrope" turn to where a text is longer than those of training."""
    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", None)
        of_layers = kinds if isinstance(kinds, dict) else {None: kinds}
        if "longrope" not in of_layers.values():
            continue
        if not _is_wrapped_by(type(module).forward, library.__file__ or ""):
            continue
        for layer, kind in of_layers.items():
            name = "long_inv_freq" if layer is None else f"{layer}_long_inv_freq"
            if kind == "longrope" and not hasattr(module, name):
                # Where settings lack something, the call itself says so.
                with contextlib.suppress(AttributeError, KeyError, TypeError):
                    setattr(module, name, _long_table(library, module, layer))


def _long_table(library: Any, module: Any, layer: str | None) -> torch.Tensor:
    settings = module.config.rope_parameters
    trained = (settings if layer is None else settings[layer])["original_max_position_embeddings"]
    make = library.ROPE_INIT_FUNCTIONS["longrope"]
    table: torch.Tensor
    table, _ = make(module.config, torch.device("cpu"), seq_len=trained + 1, layer_type=layer)
    return table


def _is_wrapped_by(function: Callable[..., Any] | None, file: str) -> bool:
    """Return whether a function is wrapped by one of a file."""
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is not None and code.co_filename == file:
            return True
        function = getattr(function, "__wrapped__", None)
    return False
