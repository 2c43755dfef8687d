"""Device maps of accelerate as plans: what loading a model with ``device_map=`` would take.

A map says per module prefix where its weights live: a GPU (``0``, ``"cuda:0"``, ``"gpu"``), ``"cpu"`` or
``"disk"``. The longest prefix of a weight's name counts, as in accelerate.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from gascompile.api.plan import machine_of
from gascompile.capture.fingerprint.target import target_prints
from gascompile.core import serial
from gascompile.core.budget import Budget
from gascompile.core.checks.workload_files import is_workload_file, load_workload
from gascompile.core.config import CompileConfig, folder_of
from gascompile.core.errors import DeviceMapError, FormatError
from gascompile.core.machine import Machine
from gascompile.core.plan import Plan
from gascompile.core.workload import TensorKind, Workload
from gascompile.passes.explain.device_map_baseline import device_map_baseline

DeviceMap = Mapping[str, int | str]
_SHOWN = 4
"""Names that a message lists."""


def read_device_map(path: str | os.PathLike[str]) -> dict[str, int | str]:
    """Read a device map from a JSON file.

    Raises:
        FormatError: the file is not JSON, or not an object of devices by module.
        StorageError: the file cannot be read.
    """
    data = serial.read_json(path)
    if not isinstance(data, dict) or not data:
        raise FormatError(f"{path}: a device map is a JSON object of devices by module prefix")
    for prefix, device in data.items():
        if isinstance(device, bool) or not isinstance(device, (int, str)):
            raise FormatError(
                f"{path}: the device of '{prefix}' is {device!r}; write 0, 'cpu' or 'disk'"
            )
    return data


def device_map_plan(
    device_map: DeviceMap,
    source: Workload | str | os.PathLike[str],
    machine: Machine | str | os.PathLike[str] | None = None,
    budget: Budget | int | str | None = None,
    *,
    batch: int = 1,
    tokens: int = 128,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Plan:
    """Return the verified plan that executes ``device_map`` the way accelerate does.

    What is mapped to the device that computes stays there; the rest is loaded whole, right before each
    op that reads it, and nothing is loaded ahead. The plan's strategy is ``device_map``.

    Args:
        device_map: devices by module prefix; ``""`` stands for the whole model.
        source: a ``Workload``, or a path or ``package.module:callable`` as ``gascompile.plan`` takes it.
        machine: what to plan for, by default this machine.
        budget: memory of the tier that computes, or a ``Budget``.
        batch: rows of made-up inputs.
        tokens: tokens per row of made-up inputs.
        cache_dir: where the machine profile is kept.

    Raises:
        DeviceMapError: a prefix or a device is unknown, a weight is in no prefix, or a tier is too small.
        InfeasiblePlanError: the budget does not hold what the map keeps; names what would.
    """
    job = Mapped.of(source, machine, budget, batch=batch, tokens=tokens, cache_dir=cache_dir)
    tiers = tiers_of(device_map, job.workload, job.machine, modules=job.modules)
    said = {prefix: str(tier) for prefix, tier in device_map.items()}
    return job.plan(tiers, {"device_map": serial.digest(said)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapped:
    """What a given placement is of."""

    workload: Workload
    machine: Machine
    budget: Budget
    modules: frozenset[str]
    """Names of the modules of a model."""

    @classmethod
    def of(
        cls,
        source: Workload | str | os.PathLike[str],
        machine: Machine | str | os.PathLike[str] | None,
        budget: Budget | int | str | None,
        *,
        batch: int,
        tokens: int,
        cache_dir: str | os.PathLike[str] | None,
        sites: bool = False,
    ) -> Mapped:
        """Read the source; arguments are those of ``device_map_plan``, and whether ops may run beside the device."""
        folder = folder_of(cache_dir, budget)
        resolved = machine_of(machine, folder)
        workload, modules = _workload_of(source, resolved, (batch, tokens), folder, sites=sites)
        limits = Budget.of(budget, resolved)
        return cls(workload=workload, machine=resolved, budget=limits, modules=modules)

    def plan(self, tiers: Mapping[str, str], prints: Mapping[str, str], site: str = "") -> Plan:
        """Return the plan with each weight on the tier that ``tiers`` says; see ``device_map_baseline``."""
        target = target_prints(self.machine, self.budget.limits_bytes(self.machine), None)
        prints = {"graph": serial.digest(self.workload), **target, **prints}
        return device_map_baseline(
            self.workload, self.machine, self.budget, tiers, fingerprint=prints, site=site
        )

    def within(self, place: str, size_bytes: int) -> Mapped:
        """Return the same with another budget of ``place``."""
        return replace(self, budget=self.budget.with_size(place, size_bytes))


def tiers_of(
    device_map: DeviceMap, workload: Workload, machine: Machine, *, modules: Collection[str] = ()
) -> dict[str, str]:
    """Return the tier that the map puts each weight on.

    Args:
        modules: names of modules that the model has; a prefix may be one of them without any weight.

    Raises:
        DeviceMapError: a prefix or a device is unknown, or a weight is in no prefix; names them.
    """
    tiers = {prefix: _tier(prefix, device, machine) for prefix, device in device_map.items()}
    names = [tensor.name for tensor in workload.tensors]
    unknown = [
        prefix
        for prefix in tiers
        if prefix not in modules and not any(_is_in(name, prefix) for name in names)
    ]
    if unknown:
        raise DeviceMapError(
            f"the device map names {_list(unknown)}, but {workload.name} has no weight or module of that name",
            names=tuple(unknown),
        )
    tier_of: dict[str, str] = {}
    unmapped = []
    for tensor in workload.tensors:
        if tensor.kind != TensorKind.WEIGHT:
            continue
        prefixes = [prefix for prefix in tiers if _is_in(tensor.name, prefix)]
        if prefixes:
            tier_of[tensor.name] = tiers[max(prefixes, key=len)]
        else:
            unmapped.append(tensor.name)
    if unmapped:
        raise DeviceMapError(
            f'the device map says nothing about {_list(unmapped)}; add a prefix of each, or "" for all others',
            names=tuple(unmapped),
        )
    return tier_of


def _tier(prefix: str, device: int | str, machine: Machine) -> str:
    """Return the tier that a device of accelerate means on ``machine``."""
    text = str(device).lower()
    site = machine.compute_tier
    tier = {"cpu": "cpu", "disk": "nvme", "nvme": "nvme"}.get(text)
    if tier is None and text in ("0", "cuda", "cuda:0", "gpu", "gpu:0"):
        tier = site
    if tier is None:
        raise DeviceMapError(
            f"the device map puts '{prefix}' on {device!r}; known are 0, 'cuda:0' and 'gpu' (here '{site}'), 'cpu' and "
            "'disk' (here 'nvme')",
            names=(prefix,),
        )
    if tier not in machine.tiers:
        raise DeviceMapError(
            f"the device map puts '{prefix}' on {device!r}, but machine '{machine.name}' has no tier '{tier}'",
            names=(prefix,),
        )
    return tier


def _is_in(name: str, prefix: str) -> bool:
    return not prefix or name == prefix or name.startswith(f"{prefix}.")


def _list(names: list[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown


def _workload_of(
    source: Workload | str | os.PathLike[str],
    machine: Machine,
    shape: tuple[int, int],
    cache_dir: Path,
    *,
    sites: bool,
) -> tuple[Workload, frozenset[str]]:
    """Return the workload of a source, and the names of the modules of a model."""
    if isinstance(source, Workload):
        return source, frozenset()
    if is_workload_file(source):
        return load_workload(source, machine), frozenset()
    from gascompile.api.model_planning import annotated_source

    config = CompileConfig(cache_dir=cache_dir, sites="all" if sites else "one")
    model, _, annotation = annotated_source(source, machine, config, shape=shape)
    return annotation.workload, frozenset(name for name, _ in model.named_modules())
