"""Says what of this machine GASCompile can use, and what to do about the rest.

Each finding is looked at, not inferred: direct I/O by writing a page, the solver by solving.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

import torch

from gascompile.codegen.build import compiler, has_compiler
from gascompile.core.errors import StorageError
from gascompile.core.machine import IoSettings, Machine
from gascompile.core.sizes import GIB, PAGE_BYTES, format_size
from gascompile.cost_models.measure.disk import ProbeReader
from gascompile.cost_models.measure.host import free_bytes, has_direct_io, memory_limit
from gascompile.machines.doctor_gpu import gpu_findings
from gascompile.machines.findings import Finding as Finding  # noqa: PLC0414 - re-exported
from gascompile.machines.findings import Status as Status  # noqa: PLC0414 - re-exported
from gascompile.machines.resolve import remembered_machine, resolve_machine
from gascompile.runtime.devices.energy_counters import package_counters
from gascompile.runtime.devices.probe import GpuFacts
from gascompile.runtime.devices.probe import look as look_at_gpu

_LITTLE_SPACE_BYTES = 10 * GIB
"""Free in a folder: less than some models of 5B in two bytes a value take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Every finding, in reading order."""

    FORMAT: ClassVar[str] = "gascompile.doctor/1"

    findings: tuple[Finding, ...]

    @property
    def healthy(self) -> bool:
        """Whether all that is required works; optional parts may be missing."""
        return not any(f.status is Status.MISSING and f.name in _REQUIRED for f in self.findings)


def examine(
    cache_dir: str | os.PathLike[str],
    *,
    measure_with: ProbeReader | None = None,
    facts: GpuFacts | None = None,
    cuda: Any = torch.cuda,
) -> Report:
    """Look at this machine; writes one page to ``cache_dir`` and to the working folder, and removes it.

    Args:
        cache_dir: the cache whose remembered machine is reported.
        measure_with: measure this machine with that reader when none is remembered (up to 4 s).
        facts: about the GPU and its path to the drives; looked at by default.
        cuda: ``torch.cuda``, or what stands in for it.
    """
    cache = Path(cache_dir)
    remembered = remembered_machine(cache)
    io = remembered.io if remembered is not None else IoSettings()
    looks: tuple[Callable[[], list[Finding]], ...] = (
        _versions,
        lambda: gpu_findings(facts or look_at_gpu(cuda=cuda), io, cuda=cuda),
        _memory,
        lambda: _folder("cache folder", _nearest_folder(cache)),
        lambda: _folder("working folder", Path.cwd()),
        lambda: _bandwidths(cache, measure_with),
        _solver,
        _optional_parts,
    )
    return Report(findings=tuple(finding for look in looks for finding in look()))


_REQUIRED = frozenset({"python", "torch", "gascompile", "pulp", "highspy", "solver"})


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _package(name: str, remedy: str) -> Finding:
    version = _version(name)
    if version is None:
        return Finding(name=name, status=Status.MISSING, detail="not installed", remedy=remedy)
    return Finding(name=name, status=Status.OK, detail=version)


def _versions() -> list[Finding]:
    python = f"{platform.python_version()} on {platform.system()} {platform.release()}"
    return [
        Finding(name="python", status=Status.OK, detail=python),
        Finding(name="torch", status=Status.OK, detail=torch.__version__),
        _package("gascompile", "install the package instead of running from its folder"),
        Finding(name="page size", status=Status.OK, detail=format_size(os.sysconf("SC_PAGE_SIZE")))
        if os.sysconf("SC_PAGE_SIZE") == PAGE_BYTES
        else Finding(
            name="page size",
            status=Status.WARN,
            detail=format_size(os.sysconf("SC_PAGE_SIZE")),
            remedy=f"plans align to {PAGE_BYTES} bytes; use a kernel with pages of that size",
        ),
    ]


def _memory() -> list[Finding]:
    limit = memory_limit()
    detail = f"{format_size(limit.size_bytes)}, set by {limit.origin}"
    return [Finding(name="memory", status=Status.OK, detail=detail)]


def _nearest_folder(path: Path) -> Path:
    return next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())


def _folder(name: str, folder: Path) -> list[Finding]:
    free = free_bytes(folder)
    little = free < _LITTLE_SPACE_BYTES
    space = Finding(
        name=f"{name}: space",
        status=Status.WARN if little else Status.OK,
        detail=f"{format_size(free)} free in {folder}",
        remedy="tensors without a file of their own are kept here; free some space"
        if little
        else "",
    )
    try:
        direct = has_direct_io(folder)
    except StorageError as error:
        return [
            space,
            Finding(
                name=f"{name}: direct I/O",
                status=Status.WARN,
                detail=str(error),
                remedy="make the folder writable or choose another one",
            ),
        ]
    finding = Finding(
        name=f"{name}: direct I/O",
        status=Status.OK if direct else Status.WARN,
        detail="O_DIRECT works" if direct else "the file system refuses O_DIRECT",
        remedy=""
        if direct
        else "reads go through the page cache; keep weights on ext4 or XFS for direct reads",
    )
    return [space, finding]


def _bandwidths(cache_dir: Path, measure_with: ProbeReader | None) -> list[Finding]:
    if measure_with is None:
        machine = remembered_machine(cache_dir)
    else:
        machine = resolve_machine(None, cache_dir=cache_dir, read=measure_with)
    if machine is None:
        return [
            Finding(
                name="bandwidths",
                status=Status.WARN,
                detail=f"this machine has not been measured in {cache_dir}",
                remedy="the first plan for this machine measures it, in under four seconds",
            )
        ]
    return [Finding(name=n, status=Status.OK, detail=d) for n, d in _rates(machine)]


def _rates(machine: Machine) -> list[tuple[str, str]]:
    lines = [
        (link.name, f"{link.bandwidth_bytes_per_s / 1e9:.2f} GB/s ({link.source})")
        for link in machine.links
    ]
    lines += [
        (f"{rate.device} memory", f"{rate.bandwidth_bytes_per_s / 1e9:.1f} GB/s ({rate.source})")
        for rate in machine.memory
    ]
    lines += [
        (f"{rate.device} {rate.dtype}", f"{rate.flops_per_s / 1e9:.0f} GFLOP/s ({rate.source})")
        for rate in machine.rates
    ]
    return lines


def _solver() -> list[Finding]:
    remedy = "pip install 'pulp>=3,<4' highspy"
    findings = [_package("pulp", remedy), _package("highspy", remedy)]
    if findings[1].status is Status.OK:
        answer = _solve_two_variables()
        right = answer == 2.0
        findings.append(
            Finding(
                name="solver",
                status=Status.OK if right else Status.MISSING,
                detail=f"HiGHS answers {answer} to a program of two integers whose answer is 2",
                remedy="" if right else "pip install --force-reinstall highspy",
            )
        )
    return findings


def _solve_two_variables() -> float:
    """Maximise x + y over integers with 2x + 2y <= 5: 2, where the relaxation would say 2.5."""
    import highspy

    model = highspy.Highs()  # type: ignore[no-untyped-call]
    model.silent()
    x, y = model.addIntegral(lb=0, ub=4), model.addIntegral(lb=0, ub=4)
    model.addConstr(2 * x + 2 * y <= 5)
    model.maximize(x + y)
    return round(float(model.getObjectiveValue()), 6)


def _compiler() -> Finding:
    if has_compiler():
        return Finding(name="C++ compiler", status=Status.OK, detail=compiler())
    return Finding(
        name="C++ compiler",
        status=Status.WARN,
        detail=f"'{compiler()}' is not there: no ops are fused, and training steps run on the heap, slower",
        remedy="install g++, or set CXX",
    )


def _energy() -> Finding:
    counters = package_counters()
    if counters.of:
        return Finding(name="energy counters", status=Status.OK, detail=counters.source)
    return Finding(
        name="energy counters",
        status=Status.WARN,
        detail=f"{counters.reason}: runs say no joules",
        remedy="run as root on the machine itself, or plan with the energy that a machine file states",
    )


def _optional_parts() -> list[Finding]:
    return [
        _compiler(),
        _energy(),
        _package("transformers", "pip install 'gascompile[hf]' to plan Hugging Face models"),
        _package("accelerate", "pip install 'gascompile[hf]' to plan Hugging Face models"),
        _package("triton", "pip install 'gascompile[gpu]' on a machine with a GPU"),
    ]
