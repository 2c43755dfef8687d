"""Lost buffers: values of non-persistent buffers that a model built on the meta device has in no checkpoint.

They come from the code of the day in every process, never from a file, so none is ever stale. Modules of the
library are set up again alone, as ``from_pretrained`` does; where that does not settle every element, or a class
is not the library's, a whole second skeleton is built.
"""

from __future__ import annotations

import copy
import sys
import types
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

import torch
from torch import nn

from gascompile.capture.fingerprint.code_origin import Origin, origin_of_code, origin_of_name

_FILLS: Final = {"float": (float("nan"), 3.0), "int": (3, 5), "bool": (0, 1)}
"""What memory holds before it is set; where a result differs between the two, something was not set."""
_KINDS: Final = {
    torch.float32: "float", torch.float64: "float", torch.int64: "int", torch.int32: "int", torch.bool: "bool",
}  # fmt: skip
"""Dtypes that the library computes in and that a model keeps: of others a second skeleton is rounded."""
_REFUSALS: Final = (
    RuntimeError, AttributeError, TypeError, ValueError, AssertionError, ArithmeticError, LookupError,
)  # fmt: skip
"""What set-up code of a model raises where it counts on more than the modules that own lost buffers."""


def rebuild_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the values of non-persistent buffers that a model built on the meta device has lost.

    Each is what the owning transformers model gives it by its own configuration and code (rotary tables, position
    ids). Buffers of other modules are absent.
    """
    lost = [
        name
        for name, buffer in model.named_buffers(remove_duplicate=False)
        if buffer.device.type == "meta" and _is_non_persistent(model, name)
    ]
    if not lost or "transformers" not in sys.modules:
        return {}
    from transformers import PreTrainedModel

    roots = {n: m for n, m in model.named_modules() if isinstance(m, PreTrainedModel)}
    by_root: dict[str, list[str]] = {}
    for name in lost:
        owners = [root for root in roots if root == "" or name.startswith(f"{root}.")]
        if owners:
            by_root.setdefault(min(owners, key=len), []).append(name)
    values: dict[str, torch.Tensor] = {}
    for root, names in by_root.items():
        prefix = f"{root}." if root else ""
        own = [name.removeprefix(prefix) for name in names]
        rebuilt = _set_up(roots[root], own) or _of_a_twin(roots[root])
        for name, inner in zip(names, own, strict=True):
            value = rebuilt.get(inner)
            if value is not None and value.device.type != "meta":
                values[name] = value.to(model.get_buffer(name).dtype)
    return values


def _set_up(root: Any, names: Collection[str]) -> dict[str, torch.Tensor] | None:
    """Return what ``_init_weights`` makes of the buffers; ``None`` unless it settles each of them.

    It runs on copies of the owning modules and of those around them, over two kinds of rubbish.
    """
    buffers = {name: root.get_buffer(name) for name in names}
    tensors = (*root.parameters(), *root.buffers())
    if any(not t.is_meta for t in tensors) or any(b.dtype not in _KINDS for b in buffers.values()):
        return None
    if not all(map(_is_of_library, _around(root, buffers).values())):
        return None
    try:
        first, second = (_initialized(root, buffers, number) for number in (0, 1))
    except _REFUSALS:
        return None
    for name, value in first.items():
        if not value.is_cpu or value.shape != buffers[name].shape:
            return None
        if not torch.equal(value, second[name]):
            return None
    return first


def _around(root: nn.Module, names: Iterable[str]) -> dict[str, nn.Module]:
    """Return path -> module of those that own tensors and of those around them, the outermost first."""
    modules = {"": root}
    for name in names:
        path = ""
        for part in name.split(".")[:-1]:
            inner = f"{path}.{part}" if path else part
            modules.setdefault(inner, modules[path].get_submodule(part))
            path = inner
    return modules


def _initialized(
    root: nn.Module, buffers: Mapping[str, torch.Tensor], number: int
) -> dict[str, torch.Tensor]:
    from transformers import PreTrainedModel

    copies: dict[str, Any] = {}
    for path, module in _around(root, buffers).items():
        copies[path] = _copy_of(module)
        if path:
            outer, _, leaf = path.rpartition(".")
            copies[outer]._modules[leaf] = copies[path]
    owners = {name: (copies[name.rpartition(".")[0]], name.rpartition(".")[2]) for name in buffers}
    with torch.no_grad(), torch.random.fork_rng(devices=[]), torch.device("cpu"):
        for name, (owner, leaf) in owners.items():
            shape, dtype = buffers[name].shape, buffers[name].dtype
            owner._buffers[leaf] = torch.full(shape, _FILLS[_KINDS[dtype]][number], dtype=dtype)
        model_of: dict[str, Any] = {}
        for path, inner in copies.items():
            is_model = isinstance(inner, PreTrainedModel)
            model_of[path] = inner if is_model else model_of[path.rpartition(".")[0]]
        # As the library goes: children first, each by the innermost model around it.
        for path in sorted(copies, key=lambda path: len(path.split(".")) if path else 0)[::-1]:
            model_of[path]._init_weights(copies[path])
    return {name: owner.get_buffer(leaf) for name, (owner, leaf) in owners.items()}


def _copy_of(module: nn.Module) -> nn.Module:
    """Return a module of the same attributes whose tensors and children can be exchanged."""
    twin = copy.copy(module)
    for held in ("_buffers", "_parameters", "_modules"):
        vars(twin)[held] = dict(vars(module)[held])
    return twin


def _is_of_library(module: nn.Module) -> bool:
    """Return whether the class of a module is the library's, and all of its code as it was installed.

    Code of the program may change buffers after the library has set them up.
    """
    kind = type(module)
    if not kind.__module__.startswith("transformers."):
        return False
    for base in kind.__mro__:
        if not origin_of_name(base.__module__).versioned:
            return False
        for value in vars(base).values():
            inner = getattr(value, "__func__", value)
            if isinstance(inner, types.FunctionType) and not origin_of_code(inner).versioned:
                return False
    return origin_of_name(kind.__module__) is Origin.INSTALLED


def _of_a_twin(root: Any) -> dict[str, torch.Tensor]:
    """Return the buffers of a second skeleton that is built with real ones."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False), torch.device("cpu"):
        twin = type(root)(root.config)
    return dict(twin.named_buffers(remove_duplicate=False))


def _is_non_persistent(model: nn.Module, name: str) -> bool:
    path, _, leaf = name.rpartition(".")
    return leaf in model.get_submodule(path)._non_persistent_buffers_set
