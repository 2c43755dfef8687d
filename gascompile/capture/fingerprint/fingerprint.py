"""Fingerprints: digests of everything a plan is made from, so that a stale plan is never reused.

A module is hashed by what tracing it could see: the code of its classes and of what they call, its
plain attributes, the names, shapes, strides and dtypes of its tensors. No field is listed by hand; what
cannot be hashed by value makes the fingerprint unique, so that it never matches.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils import _pytree as pytree

from gascompile.capture.alone import alone
from gascompile.capture.fingerprint.library_order import hooks_of_others
from gascompile.capture.fingerprint.replaced import replaced_functions
from gascompile.capture.fingerprint.target import target_prints
from gascompile.capture.fingerprint.value_digest import ValueDigest
from gascompile.capture.torch_settings import SETTINGS, modes_now, settings_now, torch_settings
from gascompile.core import serial
from gascompile.core.machine import without_host_sizes
from gascompile.core.signature import signature_of
from gascompile.core.sources import WeightSource
from gascompile.core.tensor_attributes import attributes_of

if TYPE_CHECKING:
    from gascompile.api.compile import Job
    from gascompile.weights.checkpoint import Checkpoint

_ELSEWHERE = {
    # Names and shapes of tensors are fed by themselves, child modules by their own names.
    "_parameters", "_buffers", "_modules",
    # Set by torch's and transformers' own machinery, another one in each process.
    "_compiled_call_impl", "_original_object_hash",
}  # fmt: skip

CAPTURED = ("graph", "inputs", SETTINGS, "versions")
"""Parts of a plan's key that its capture was made of, as well."""


@dataclass(frozen=True, slots=True)
class ModulePrint:
    """The digest of a module, and what of it no digest can know."""

    digest: str
    opaque: tuple[str, ...]
    """Names of values that cannot be compared: with any, the digest proves nothing."""
    reached: frozenset[str]
    """The program's functions that the digest covers."""
    tensors: tuple[torch.Tensor, ...] = ()
    """Of a step, the tensors that the digest met beside the model's, of which it has the layouts alone."""

    @property
    def key(self) -> str:
        """The digest; one that no other has where it proves nothing."""
        return self.digest if not self.opaque else f"{self.digest}-{uuid.uuid4().hex}"


@alone
def module_print(model: nn.Module) -> ModulePrint:
    """Return the digest of a module with what is unsure about it."""
    hasher = ValueDigest(id(module) for module in model.modules())
    _feed_model(hasher, model)
    _around(hasher)
    return ModulePrint(hasher.digest(), tuple(hasher.opaque), frozenset(hasher.reached))


@alone
def step_print(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    left: Collection[int] = (),
    parts: Collection[Any] = (),
) -> ModulePrint:
    """Return the digest of a module that is trained, of its loss and of what batches are made of.

    A step reads tensors anew each time, so none counts by its values, and where the model's lie is not asked: they
    may be out of memory.

    Args:
        left: storages, by identity, that tensors of the model have left.
        parts: of the batch, see ``program_parts``.
    """
    own: dict[int, str] = {}
    taken = set(left)
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        own.setdefault(id(tensor), name)
        taken.add(tensor.untyped_storage()._cdata)
    hasher = ValueDigest((id(module) for module in model.modules()), own)
    _feed_model(hasher, model)
    hasher.add("requires gradients", [p.requires_grad for p in model.parameters()])
    hasher.value(loss_fn, "loss_fn")
    for number, part in enumerate(parts):
        hasher.value(part, getattr(part, "__qualname__", f"part {number} of the batch"))
    _around(hasher)
    hasher.opaque += modes_now()
    text = hasher.digest()
    for tensor in hasher.met:
        if tensor.layout is torch.strided and tensor.untyped_storage()._cdata in taken:
            hasher.opaque.append(f"a tensor of {list(tensor.shape)} is a view of the model's")
    return ModulePrint(text, tuple(hasher.opaque), frozenset(hasher.reached), tuple(hasher.met))


def _feed_model(hasher: ValueDigest, model: nn.Module) -> None:
    names: dict[int, str] = {}
    storages: dict[int, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        hasher.add("module", path, module.training)
        hasher.value(type(module), type(module).__name__)
        hasher.add([(name, child is None) for name, child in module._modules.items()])
        for kind, tensors in (("p", module._parameters), ("b", module._buffers)):
            for name, tensor in tensors.items():
                if tensor is None:
                    hasher.add(kind, name, None)
                else:
                    here = f"{path}.{name}"
                    hasher.add(
                        kind,
                        name,
                        names.setdefault(id(tensor), here),
                        here if hasher.own is not None else _storage_name(tensor, here, storages),
                        str(tensor.dtype),
                        tuple(tensor.shape),
                        tensor.stride() if tensor.layout is torch.strided else str(tensor.layout),
                        str(tensor.device.type),
                    )
                    if kind == "b" and tensor.requires_grad:
                        hasher.add("requires gradients")
                    for key, value in sorted(attributes_of(tensor).items()):
                        hasher.add("attribute of a tensor", key)
                        hasher.value(value, f"{here}.{key}")
        hasher.add("non-persistent", sorted(module._non_persistent_buffers_set))
        for name, value in sorted(vars(module).items()):
            if name not in _ELSEWHERE:
                hasher.add("attribute", name)
                hooks = "_hooks" in name and isinstance(value, dict)
                where = f"{path}.{name}" if path else name
                hasher.value(hooks_of_others(value) if hooks else value, where)


def _around(hasher: ValueDigest) -> None:
    """Feed what tracing sees of the process: settings of torch, modes, hooks of all modules."""
    for number, mode in enumerate(torch.overrides._get_current_function_mode_stack()):
        hasher.value(mode, f"torch function mode {number}")
    for name in sorted(vars(torch_module)):
        if name.startswith("_global_") and name.endswith("_hooks"):
            hasher.value(list(vars(torch_module)[name].values()), name)
    for place, function in replaced_functions():
        hasher.add("replaced", place)
        hasher.value(function, place)
    hasher.add(torch_settings())


def _storage_name(tensor: torch.Tensor, name: str, storages: dict[int, str]) -> str:
    """Return the first name of a tensor in the same memory."""
    if tensor.layout is not torch.strided or tensor.device.type == "meta" or not tensor.numel():
        return name
    return storages.setdefault(tensor.untyped_storage().data_ptr(), name)


def plan_prints(
    job: Job, call: tuple[Any, Any], checkpoint: Checkpoint | None, printed: ModulePrint
) -> dict[str, str]:
    """Return the digest of every input of a plan, by part.

    Args:
        job: what is planned.
        call: the arguments of a call, by place and by name.
        checkpoint: where the weights lie, if they lie in files.
        printed: of the job's model.
    """
    leaves, spec = pytree.tree_flatten(call)
    signature = [str(spec), signature_of(leaves), repr(job.dynamic_shapes)]
    shared = serial.digest(job.arena_of) if job.arena_of else ""
    layout = checkpoint.sources if checkpoint else {}
    return {
        "graph": printed.key,
        "inputs": serial.digest(signature),
        SETTINGS: settings_now(),
        "weights": serial.digest({n: _lie(s) for n, s in sorted(layout.items())}),
        **target_prints(
            without_host_sizes(job.machine), job.budget.limits_bytes(job.machine), job.config
        ),
        "sharing": serial.digest([shared, job.reserved_bytes]),
        "versions": made_by(),
    }


def _lie(source: WeightSource) -> list[object]:
    """Return what the program of a model depends on of how a weight lies."""
    rows = [source.interleaved_heads] if source.interleaved_heads else []
    return [source.dtype, list(source.shape), *rows]


@cache
def made_by() -> str:
    """Return a digest of the versions and of when each file of this library was written.

    A checkout changes under one version; what it made yesterday is not what it makes today.
    """
    rooms = ("gascompile", "gascompile.passes", "gascompile.cost_models", "gascompile.runtime")
    specs = [find_spec(room) for room in rooms]
    folders = {folder for s in specs if s for folder in s.submodule_search_locations or ()}
    written = [line for folder in sorted(folders) for line in _written(folder)]
    return serial.digest([versions(), "\n".join(written)])


def _written(folder: str) -> Iterator[str]:
    """Give a line per file of a folder of code, with its size and when it was written."""
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.name.endswith(".py"):
                status = entry.stat()
                yield f"{entry.path} {status.st_size} {status.st_mtime_ns}"
            elif entry.name != "__pycache__" and entry.is_dir():
                yield from _written(entry.path)


def versions() -> dict[str, str]:
    """Return the versions that a captured program depends on."""
    from gascompile import __version__

    return {"gascompile": __version__, "torch": str(torch.__version__)}
