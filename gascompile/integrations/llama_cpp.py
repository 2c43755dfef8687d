"""Placements of llama.cpp as plans: ``-ngl`` says how many layers the GPU holds, ``-ot`` where single tensors lie.

Ops run where their weights lie. The last layers go to the GPU, the outputs count as one behind them, and the
table of words stays in the host's memory. A pattern of ``-ot`` is searched for in a tensor's name, the first that is
found counts; names are those of GGUF files, where the ``gguf`` package knows them, and the model's own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from gascompile.core import serial
from gascompile.core.budget import Budget
from gascompile.core.errors import DeviceMapError
from gascompile.core.machine import Machine
from gascompile.core.plan import Plan
from gascompile.core.workload import TensorKind, Workload
from gascompile.integrations.device_map import Mapped

_LAYER = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks|block|blk)\.(\d+)\.")
_WORDS = re.compile(r"(?:^|\.)(?:embed_tokens|wte|wpe|token_embd|word_embeddings|embeddings?)\.")
_HOST = "cpu"
_LONGEST_PATTERN = 1000  # letters


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaCppPlacement:
    """Where llama.cpp is told to put weights."""

    num_gpu_layers: int
    """``-ngl``: of the last layers, the outputs being one more."""
    overrides: tuple[tuple[str, str], ...] = ()
    """``-ot``: patterns and devices."""

    @classmethod
    def of(cls, num_gpu_layers: int, override_tensor: Sequence[str] = ()) -> LlamaCppPlacement:
        """Return a placement as llama.cpp's command line has it.

        Args:
            num_gpu_layers: 0 and more.
            override_tensor: each one or several, with commas between them, such as ``"ffn_.*_exps=CPU"``.

        Raises:
            DeviceMapError: there is no device behind a pattern, or a pattern is none.
        """
        if num_gpu_layers < 0:
            raise DeviceMapError(f"-ngl takes 0 layers and more, not {num_gpu_layers}")
        pairs = []
        for part in (part for given in override_tensor for part in given.split(",")):
            pattern, equals, device = part.rpartition("=")
            try:
                re.compile(pattern)
            except re.error as error:
                raise DeviceMapError(f"-ot {part[:200]!r} is no pattern: {error}") from error
            if not equals or not pattern or len(pattern) > _LONGEST_PATTERN:
                raise DeviceMapError(
                    f"-ot takes PATTERN=DEVICE, such as 'ffn_.*_exps=CPU', not {part[:200]!r}"
                )
            pairs.append((pattern, device))
        return cls(num_gpu_layers=num_gpu_layers, overrides=tuple(pairs))

    def tiers(self, workload: Workload, machine: Machine) -> dict[str, str]:
        """Return the tier of each weight.

        Raises:
            DeviceMapError: a device is unknown, or no weight has a name that a pattern is found in.
        """
        weights = [t.name for t in workload.tensors if t.kind == TensorKind.WEIGHT]
        layer_of = {name: _layer(name) for name in weights}
        num_layers = max((n for n in layer_of.values() if n is not None), default=-1) + 1
        first = max(num_layers + 1 - self.num_gpu_layers, 0)
        known = _gguf_names(weights, num_layers)
        devices = [(pattern, _tier(device, machine)) for pattern, device in self.overrides]
        used: set[str] = set()
        tier_of = {}
        for name in weights:
            names = (known.get(name, name), name)
            hit = next((o for o in devices if any(re.search(o[0], n) for n in names)), None)
            if hit is not None:
                used.add(hit[0])
                tier_of[name] = hit[1]
                continue
            layer = layer_of[name]
            is_words = layer is None and _WORDS.search(name) is not None
            on_gpu = not is_words and (num_layers if layer is None else layer) >= first
            tier_of[name] = machine.compute_tier if on_gpu else _HOST
        idle = [pattern for pattern, _ in self.overrides if pattern not in used]
        if idle:
            raise DeviceMapError(
                f"-ot {idle[0]!r} is found in no weight's name that an earlier pattern has left; names are such as "
                f"{', '.join(repr(known.get(n, n)) for n in weights[:3])}",
                names=tuple(idle),
            )
        return tier_of


def llama_cpp_plan(
    placement: LlamaCppPlacement,
    source: Workload | str | os.PathLike[str],
    machine: Machine | str | os.PathLike[str] | None = None,
    budget: Budget | int | str | None = None,
    *,
    batch: int = 1,
    tokens: int = 128,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Plan:
    """Return the verified plan that executes a placement the way llama.cpp does, strategy ``llama_cpp``.

    Args:
        placement: what ``-ngl`` and ``-ot`` say.
        source: a ``Workload``, or a path or ``package.module:callable`` as ``gascompile.plan`` takes it.
        machine: what to plan for, by default this machine; ops on the host need its speed in it.
        budget: memory of the tier that computes, or a ``Budget``.
        batch: rows of made-up inputs.
        tokens: tokens per row of made-up inputs.
        cache_dir: where the machine profile is kept.

    Raises:
        DeviceMapError: the machine computes on the host or does not know its speed, a device or a pattern is unknown,
            or a tier is too small.
        InfeasiblePlanError: the budget does not hold what the placement keeps; names what would.
    """
    job = Mapped.of(
        source, machine, budget, batch=batch, tokens=tokens, cache_dir=cache_dir, sites=True
    )
    require_host(job)
    tiers = placement.tiers(job.workload, job.machine)
    return job.plan(tiers, {"llama_cpp": serial.digest(placement)}, site=_HOST)


def require_host(job: Mapped) -> None:
    """Refuse a machine without the speed of a host beside an accelerator; raises ``DeviceMapError``."""
    if job.machine.compute_tier == _HOST or not any(_HOST in op.time_s for op in job.workload.ops):
        raise DeviceMapError(
            f"machine '{job.machine.name}' does not say how fast its host computes beside an accelerator, which "
            "llama.cpp's placements are about; take a preset with both, or measure one with 'gascompile calibrate'"
        )


def _layer(name: str) -> int | None:
    match = _LAYER.search(name)
    return int(match[1]) if match else None


def _tier(device: str, machine: Machine) -> str:
    """Return the tier that a buffer of llama.cpp means; raises ``DeviceMapError``."""
    text = device.upper()
    if text in ("CPU", "CUDA_HOST", "CPU_MAPPED"):
        return _HOST
    if re.fullmatch(r"(CUDA|ROCM|VULKAN|SYCL|METAL|GPU)0?", text):
        return machine.compute_tier
    raise DeviceMapError(
        f"-ot puts weights on {device[:200]!r}; known are CPU, and CUDA0 for '{machine.compute_tier}'",
        names=(device[:200],),
    )


def _gguf_names(weights: Sequence[str], num_layers: int) -> dict[str, str]:
    """Return the names that GGUF files have for weights, as far as they are known."""
    try:
        import gguf
    except ImportError:
        return {}
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, max(num_layers, 1))
    name_of = {name: table.get_name(name, try_suffixes=(".weight", ".bias")) for name in weights}
    return {name: made for name, made in name_of.items() if made is not None}
