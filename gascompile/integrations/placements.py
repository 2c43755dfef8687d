"""Placements of other tools as one type: which place each weight is told to lie on, and how that is executed.

Read from device maps of accelerate and configurations of DeepSpeed (JSON), and from command lines of llama.cpp. What
such a file says and no plan follows is named, with the reason.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gascompile.core import serial
from gascompile.core.errors import DeviceMapError, FormatError, InfeasiblePlanError
from gascompile.core.plan import Plan
from gascompile.core.workload import TensorKind
from gascompile.integrations.device_map import Mapped, read_device_map, tiers_of
from gascompile.integrations.llama_cpp import LlamaCppPlacement, require_host

_MOST_LAYERS = 10_000  # more than any model has; stands for "all"
_EXPERTS = r"(?:^|\.)(?:ffn_(?:up|down|gate|gate_up)_(?:ch)?exps|experts)\b"
"""As llama.cpp's own pattern for --cpu-moe, and models' own names; shared experts are others."""
_NOT_HERE = "no plan of one forward pass has it"
_PERSISTENT_ELEMENTS = 100_000
"""DeepSpeed's default: parameters of no more elements stay where ops compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherPlacement:
    """Where another tool is told to put weights."""

    origin: str
    """``accelerate``, ``DeepSpeed`` or ``llama.cpp``."""
    tiers: Callable[[Mapped], Mapping[str, str]]
    """Returns the place of each weight; raises ``DeviceMapError``."""
    site: str = ""
    """A place whose weights' ops run there; weights of others come to where ops compute."""
    loads_ahead: bool = False
    """Whether weights may come before their op, how early no plan here knows: its time is between two."""
    not_modelled: Mapping[str, str] = field(default_factory=dict)
    """Why a field, or a flag, is not followed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What another tool's placement takes."""

    plan: Plan
    """Each weight is loaded right before its ops."""
    least_s: float
    """Seconds per iteration if all loads were hidden as far as links and ops allow; those of the plan where none is."""
    required_bytes: int
    over_bytes: int
    """What the place that computes needs beyond the budget; 0 where it fits."""


def read_placement(text: str) -> OtherPlacement:
    """Return the placement in a JSON file, or of llama.cpp's flags, such as ``"-ngl 20 -ot exps=CPU"``.

    Raises:
        DeviceMapError: flags or fields cannot be.
        FormatError: the file is none of these.
        StorageError: it cannot be read.
    """
    if text.lstrip().startswith("-"):
        return _of_llama_cpp(text)
    data = serial.read_json(text, strict=False)
    if isinstance(data, dict) and "zero_optimization" in data:
        return _of_deepspeed(Path(text), data)
    if not isinstance(data, dict) or any(isinstance(v, (dict, list)) for v in data.values()):
        raise FormatError(
            f"{text[:1000]} is neither a device map (JSON of devices by module) nor a configuration of DeepSpeed with "
            "zero_optimization; llama.cpp's flags are given as they are: --compare='-ngl 20'"
        )
    device_map = read_device_map(text)
    return OtherPlacement(
        origin="accelerate",
        tiers=lambda job: tiers_of(device_map, job.workload, job.machine, modules=job.modules),
    )


def taken_by(placement: OtherPlacement, job: Mapped) -> Taken:
    """Plan what a placement takes, with as much memory where ops compute as it needs.

    Raises:
        DeviceMapError: a device, a module or a pattern is unknown, or a place that does not compute is too small.
        InfeasiblePlanError: a place that does not compute is too small for what it needs beside weights.
    """
    if placement.site:
        require_host(job)
    tiers = placement.tiers(job)
    prints = {"placement": serial.digest({"origin": placement.origin, **tiers})}
    tier = job.machine.compute_tier
    limit_bytes = job.budget.limits_bytes(job.machine)[tier]
    try:
        plan, required_bytes = job.plan(tiers, prints, placement.site), 0
    except InfeasiblePlanError as error:
        if error.tier != tier:
            raise
        required_bytes = error.required_bytes
        plan = job.within(tier, required_bytes).plan(tiers, prints, placement.site)
    seconds = plan.certificate.predicted_s
    return Taken(
        plan=plan,
        least_s=min(_least_s(plan), seconds) if placement.loads_ahead else seconds,
        required_bytes=max(required_bytes, plan.peak_bytes[tier]),
        over_bytes=max(required_bytes - limit_bytes, 0),
    )


def _least_s(plan: Plan) -> float:
    """Return the longer of all ops one after the other, and of what each link carries."""
    carried = (
        size_bytes / plan.machine.link(name).bandwidth_bytes_per_s
        for name, size_bytes in plan.link_bytes.items()
    )
    return max(sum(op.time_s for op in plan.ops), *carried, 0.0)


def _of_llama_cpp(text: str) -> OtherPlacement:
    layers: int | None = None
    overrides: list[str | tuple[str, str]] = []
    others: dict[str, str] = {}
    for flag, value in _flags(text):
        if flag in ("-ngl", "--gpu-layers", "--n-gpu-layers"):
            layers = _MOST_LAYERS if value == "all" else _count(flag, value)
        elif flag in ("-ot", "--override-tensor"):
            overrides.append(value)
        elif flag in ("-ncmoe", "--n-cpu-moe"):
            first = "|".join(map(str, range(_count(flag, value))))
            if first:
                overrides.append((rf"(?:blk|layers)\.(?:{first})(?=\.).*{_EXPERTS}", "CPU"))
        elif flag in ("-cmoe", "--cpu-moe") and not value:
            overrides.append((_EXPERTS, "CPU"))
        else:
            others[f"{flag} {value}".strip()[:200]] = "no plan follows this flag"
    if layers is None:
        raise DeviceMapError("llama.cpp's layers on the GPU are not said; add -ngl N, or -ngl all")
    pairs: list[tuple[str, str]] = []
    for given in overrides:
        one = isinstance(given, tuple)
        pairs += [given] if one else LlamaCppPlacement.of(0, [given]).overrides  # type: ignore[list-item]
    placement = LlamaCppPlacement(num_gpu_layers=layers, overrides=tuple(pairs))
    return OtherPlacement(
        origin="llama.cpp",
        tiers=lambda job: placement.tiers(job.workload, job.machine),
        site="cpu",
        not_modelled=others,
    )


def _flags(text: str) -> Iterator[tuple[str, str]]:
    """Yield flags and their values; both ``--flag value`` and ``--flag=value``."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise DeviceMapError(f"these flags of llama.cpp cannot be read: {error}") from error
    i = 0
    while i < len(words):
        flag, equals, value = words[i].partition("=")
        if not re.fullmatch(r"--?[a-z][\w-]*", flag):
            raise DeviceMapError(
                f"{words[i][:200]!r} is no flag of llama.cpp; write -ngl N and so on"
            )
        i += 1
        if not equals and i < len(words) and not words[i].startswith("-"):
            value = words[i]
            i += 1
        yield flag, value


def _count(flag: str, value: str) -> int:
    if not value.isascii() or not value.isdigit() or int(value) > _MOST_LAYERS:
        raise DeviceMapError(f"{flag} takes a number of layers, not {value[:200]!r}")
    return int(value)


_HALVES = ("bf16", "fp16")
"""Sections that say whether weights are of two bytes, which ``stage3_param_persistence_threshold`` needs."""
_DEVICES = {"none": "", "cpu": "cpu", "nvme": "nvme"}
_AHEAD = "how early weights come: times are between no such load and loads that are hidden"
_ZERO_REASONS = {
    "offload_optimizer": _NOT_HERE,
    "stage3_prefetch_bucket_size": _AHEAD,
    "stage3_max_live_parameters": _AHEAD,
    "stage3_max_reuse_distance": _AHEAD,
    "offload_param.nvme_path": "the machine's drive is taken",
    "offload_param.buffer_count": "buffers of the host are not counted",
    "offload_param.buffer_size": "buffers of the host are not counted",
    "offload_param.max_in_cpu": "all parameters lie on the drive",
    "offload_param.pin_memory": "links have the machine's rates",
    "offload_param.ratio": "all parameters are offloaded",
}


def _of_deepspeed(path: Path, data: Mapping[str, Any]) -> OtherPlacement:
    zero = data["zero_optimization"]
    if not isinstance(zero, dict):
        raise FormatError(f"{path}: zero_optimization is no object")
    stage = zero.get("stage", 0)
    offload = zero.get("offload_param") or {}
    if type(stage) is not int or not 0 <= stage <= 3 or not isinstance(offload, dict):
        raise FormatError(f"{path}: zero_optimization needs a stage of 0 to 3 and objects below it")
    device = offload.get("device", "none")
    if not isinstance(device, str) or device not in _DEVICES:
        raise DeviceMapError(
            f"{path}: offload_param.device is {device!a:.200}; known are none, cpu and nvme"
        )
    others = {f"zero_optimization.{name}": why for name, why in _zero_fields(zero)}
    others |= {name: _NOT_HERE for name in data if name not in ("zero_optimization", *_HALVES)}
    place = _DEVICES[device]
    if stage < 3 and place:
        others["zero_optimization.offload_param.device"] = (
            "DeepSpeed offloads parameters in stage 3 alone"
        )
        place = ""
    kept = zero.get("stage3_param_persistence_threshold", _PERSISTENT_ELEMENTS)
    if kept == "auto":
        others["zero_optimization.stage3_param_persistence_threshold"] = (
            f"'auto' depends on the model; {_PERSISTENT_ELEMENTS} elements are taken"
        )
        kept = _PERSISTENT_ELEMENTS
    if isinstance(kept, bool) or not isinstance(kept, (int, float)) or not kept >= 0:
        raise FormatError(f"{path}: stage3_param_persistence_threshold is no number of elements")
    is_half = any(_is_on(path, name, data.get(name)) for name in _HALVES)
    kept_bytes = kept * (2 if is_half else 4)

    def tiers(job: Mapped) -> Mapping[str, str]:
        site = job.machine.compute_tier
        if place and place not in job.machine.tiers:
            raise DeviceMapError(f"machine '{job.machine.name}' has no place '{place}'")
        weights = (t for t in job.workload.tensors if t.kind == TensorKind.WEIGHT)
        return {w.name: place if place and w.size_bytes > kept_bytes else site for w in weights}

    return OtherPlacement(
        origin="DeepSpeed", tiers=tiers, loads_ahead=bool(place), not_modelled=others
    )


def _is_on(path: Path, name: str, section: Any) -> bool:
    """Return whether weights are of two bytes; raises ``FormatError`` where that is left to another program."""
    enabled = section.get("enabled", False) if isinstance(section, dict) else section
    if enabled is None or isinstance(enabled, bool):
        return bool(enabled)
    raise FormatError(
        f"{path}: {name}.enabled is {enabled!a:.200}, and what stays where ops compute depends on it; write true or "
        "false"
    )


def _zero_fields(zero: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the fields of ``zero_optimization`` that are not followed, with the reason."""
    for name, value in zero.items():
        if name in ("stage", "stage3_param_persistence_threshold"):
            continue
        if name == "offload_param" and isinstance(value, dict):
            for inner in value:
                if inner != "device":
                    known = f"{name}.{inner}"
                    yield known, _ZERO_REASONS.get(known, "no plan follows this field")
        elif name != "offload_param":
            yield name, _ZERO_REASONS.get(name, "no plan follows this field")
