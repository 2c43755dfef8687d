"""Finds the machine to plan for: this one (measured once and remembered), a preset, or a file.

A remembered machine is a ``gascompile.machine/2`` file named after everything that its numbers depend
on, so that another processor, memory limit, disk, kernel or torch version is measured anew.
"""

from __future__ import annotations

import hashlib
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from gascompile.core import serial
from gascompile.core.checks.machine_files import load_machine, named_machine
from gascompile.core.checks.machine_files import preset as preset  # noqa: PLC0414 - re-exported
from gascompile.core.checks.machine_files import preset_names as preset_names  # noqa: PLC0414 - re-exported
from gascompile.core.errors import FormatError, StorageError
from gascompile.core.files import exclusive
from gascompile.core.machine import Machine
from gascompile.cost_models.measure.host import (
    cpu_model,
    file_system_id,
    machine_name,
    memory_limit,
)
from gascompile.machines.emulated import EMULATED, emulated_machine
from gascompile.machines.read_path import readable_here
from gascompile.machines.stale_profile import SUFFIX, is_stale
from gascompile.runtime.devices.probe import usable_gpu

if TYPE_CHECKING:
    from gascompile.cost_models.measure.disk import ProbeReader

_log = logging.getLogger(__name__)


def resolve_machine(
    machine: Machine | str | os.PathLike[str] | None,
    *,
    cache_dir: str | os.PathLike[str],
    read: ProbeReader,
) -> Machine:
    """Return the machine to plan for.

    Args:
        machine: a ``Machine``; the name of a preset; the path of a ``gascompile.machine/2`` file; or
            ``None`` for this machine, measured at the first call (up to six seconds) and remembered.
            ``emulated`` is the emulated accelerator at the speed of this machine's processor.
        cache_dir: where this machine is remembered; also the disk that is measured. Made if missing.
        read: the reader that will run plans, measured with the disk.

    Raises:
        ValueError: a name that is neither a preset nor a file.
        FormatError: the file is not a machine, or its numbers make no sense.
        StorageError: the file cannot be read, or ``cache_dir`` cannot be written to.
    """
    if machine is None:
        return _this_machine(Path(cache_dir), read)
    if machine == EMULATED:
        host = _this_machine(Path(cache_dir), read)
        return emulated_machine(replace(host, name=host_name()))
    return named_machine(machine)


def host_name() -> str:
    """Return the name of this machine without its GPU."""
    return machine_name()


def this_machine_name() -> str:
    """Return the name that plans made for this machine carry, without measuring it."""
    gpu = usable_gpu()
    if not gpu:
        return host_name()
    from gascompile.cost_models.measure.gpu import named_with_gpu

    return named_with_gpu(host_name(), gpu)


def remembered_machine(cache_dir: str | os.PathLike[str]) -> Machine | None:
    """Return this machine as it was measured earlier, or ``None`` when it was not, or not readably."""
    folder = Path(cache_dir)
    path = remembered_path(folder) if folder.is_dir() else None
    if path is None or not path.exists():
        return None
    try:
        machine = load_machine(path)
    except (FormatError, StorageError) as error:
        _log.warning("the remembered machine is damaged and will be measured again: %s", error)
        return None
    return _with_free_memory(_with_memory_limit(machine))


def remember_machine(machine: Machine, cache_dir: Path) -> None:
    """Write this machine's numbers, in place of what was remembered; raises ``StorageError``."""
    stale = remembered_path(cache_dir).with_suffix(SUFFIX)
    for path in (op_times_path(cache_dir), step_times_path(cache_dir), stale):
        path.unlink(missing_ok=True)
    serial.write_atomic(remembered_path(cache_dir), serial.dumps(machine))


def measure_briefly(*, cache_dir: str | os.PathLike[str], read: ProbeReader) -> Machine:
    """Measure this machine in a few seconds and remember it; ``calibration`` does so thoroughly.

    Raises:
        StorageError: ``cache_dir`` cannot be made or written to.
    """
    from gascompile.cost_models.measure.machine import SHORT, measure_machine
    from gascompile.machines.busy import warned_if_busy
    from gascompile.machines.gpu import with_gpu
    from gascompile.machines.meetings import with_meetings

    folder = made_folder(Path(cache_dir))
    with warned_if_busy("this machine"):
        machine = with_meetings(measure_machine(folder=folder, read=read))
        machine = with_gpu(machine, folder, read, SHORT)
    remember_machine(machine, folder)
    return machine


def profile_of(machine: Machine, cache_dir: Path) -> Path | None:
    """Return the file that ``machine`` is remembered in, if it is this one as it was measured."""
    if machine.compute_backend == "emulated" or machine.name != this_machine_name():
        return None
    path = remembered_path(cache_dir)
    return path if path.is_file() else None


def _this_machine(cache_dir: Path, read: ProbeReader) -> Machine:
    made_folder(cache_dir)
    path = remembered_path(cache_dir)
    before = _written_ns(path)
    machine = None if is_stale(path) else remembered_machine(cache_dir)
    if machine is None:
        # Of processes that begin at once one measures: all plan with its numbers, and none disturbs it.
        with exclusive(cache_dir / ".machine.lock"):
            if _written_ns(path) != before:
                machine = remembered_machine(cache_dir)
            if machine is None:
                measured = measure_briefly(cache_dir=cache_dir, read=read)
                machine = _with_free_memory(measured)
    return readable_here(machine)


def _written_ns(path: Path) -> int | None:
    """Return when a file was written; ``None`` where there is none."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


def _with_free_memory(machine: Machine) -> Machine:
    if "gpu" not in machine.tiers:
        return machine
    from gascompile.machines.gpu import with_free_memory

    return with_free_memory(machine)


def made_folder(folder: Path) -> Path:
    """Return ``folder``, made if missing; raises ``StorageError``."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"cannot make the cache folder {folder}: {error.strerror}; choose another cache_dir"
        ) from error
    return folder


_MEASURED_AS = "gascompile.machine/1 with meetings"
"""Another one where what was measured before means something else; files of older formats are read."""


def remembered_path(cache_dir: Path) -> Path:
    """Return the file that this machine's numbers are remembered in."""
    uname = os.uname()
    parts = (
        _MEASURED_AS,
        cpu_model(),
        str(os.cpu_count()),
        str(torch.get_num_threads()),
        file_system_id(cache_dir),
        torch.__version__,
        f"{uname.sysname} {uname.release} {uname.machine}",
    )
    gpu = usable_gpu()
    names = (*parts, gpu) if gpu else parts
    key = hashlib.blake2b("\n".join(names).encode(), digest_size=12).hexdigest()
    return cache_dir / "machine" / f"{key}.json"


def op_times_path(cache_dir: Path) -> Path:
    """Return the file for what ops take on this machine; it goes with the machine's numbers."""
    return remembered_path(made_folder(cache_dir)).with_suffix(".ops.json")


def step_times_path(cache_dir: Path) -> Path:
    """Return the file for what the ops of training steps take; it goes with the machine's numbers, too."""
    return remembered_path(made_folder(cache_dir)).with_suffix(".ops.steps.json")


def _with_memory_limit(machine: Machine) -> Machine:
    """Give the CPU tier what this process may use now; rates do not depend on it, limits come and go."""
    tier = replace(machine.tiers["cpu"], size_bytes=memory_limit().size_bytes)
    return machine.with_place(tier)
