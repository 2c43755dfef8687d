"""Rank drives: how many ranks of a host keep what leaves their memory on one drive, and what each has of it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

from gascompile.core.machine import Machine
from gascompile.runtime.transfer.routing import drive_of


def own_share(
    machine: Machine, folder: Path, gather: Callable[[str, bytes], list[bytes]]
) -> Machine:
    """Return the machine with this rank's even part of its drive: ranks read and write at the same time.

    Links of an emulated accelerator are each process's own.

    Args:
        machine: of the host.
        folder: where the values lie that leave memory; it is there.
        gather: returns the bytes that each rank has; all ranks call it.

    Raises:
        RankError: a rank has failed.
    """
    own = f"{socket.gethostname()} {drive_of(os.stat(folder).st_dev)}".encode()
    count = gather("the drive of its values", own).count(own)
    if count < 2 or machine.compute_backend == "emulated":
        return machine
    return machine.with_drives(1 / count)
