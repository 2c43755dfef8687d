"""Ranks that keep values on one drive have even parts of it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from gascompile.core.machine import Machine
from gascompile.machines.emulated import emulated_machine
from gascompile.machines.resolve import preset
from gascompile.runtime.transfer.routing import drive_of
from gascompile.training.rank_drives import own_share
from tests.training import trials

MACHINE = preset(trials.MACHINE)


def _ranks(*others: bytes) -> Callable[[str, bytes], list[bytes]]:
    """Return what tells what other ranks have said before this one."""
    return lambda _, own: [*others, own]


def _drive(folder: Path, host: str = "") -> bytes:
    return f"{host or socket.gethostname()} {drive_of(os.stat(folder).st_dev)}".encode()


def test_who_shares_a_drive_has_an_even_part(tmp_path: Path) -> None:
    same = _drive(tmp_path)
    found = own_share(MACHINE, tmp_path, _ranks(same, same, same))
    assert found == MACHINE.with_drives(0.25)
    for link, own in zip(MACHINE.links, found.links, strict=True):
        assert own.bandwidth_bytes_per_s == link.bandwidth_bytes_per_s / 4


@pytest.mark.parametrize("host", ["another host", ""])
def test_another_drive_or_host_takes_nothing(tmp_path: Path, host: str) -> None:
    other = _drive(tmp_path, host) if host else _drive(Path("/proc"))
    assert own_share(MACHINE, tmp_path, _ranks(other)) is MACHINE


def test_an_emulated_accelerator_has_links_of_its_own(tmp_path: Path) -> None:
    machine: Machine = emulated_machine(MACHINE)
    assert own_share(machine, tmp_path, _ranks(_drive(tmp_path))) is machine
