"""Hosts by name or file, and a refusal of those whose numbers make no sense, with the JSON path of the first one."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

from gascompile.core import serial
from gascompile.core.checks.machine import check_machine
from gascompile.core.checks.machine_files import preset_names
from gascompile.core.errors import FormatError, StorageError
from gascompile.core.files import is_file
from gascompile.core.hosts import Hosts, Interconnect

MAX_RANKS = 1 << 17  # more than any cluster has; a file of nonsense ends here
MAX_KINDS = 64  # of hosts, each with a machine of its own
_RATES = (1.0, 1e15)
_MAX_LATENCY_S = 60.0  # of a message; networks take microseconds to milliseconds


def named_hosts(hosts: Hosts | str | os.PathLike[str]) -> Hosts:
    """Return hosts given as themselves, by the name of a preset or by their file, checked.

    Raises:
        FormatError: they are no hosts, or their numbers make no sense.
        StorageError: the file cannot be read, or there is none.
    """
    if isinstance(hosts, Hosts):
        check_hosts(hosts, where=f"hosts '{hosts.name}': $")
        return hosts
    name = os.fspath(hosts)
    if name in host_presets():
        folder = resources.files("gascompile.cost_models") / "presets" / "hosts"
        with resources.as_file(folder / f"{name}.json") as path:
            return load_hosts(path)
    if is_file(name):
        return load_hosts(name)
    raise StorageError(
        f"there is no hosts file {name}; give a file of format {Hosts.FORMAT} or one of the presets "
        f"{', '.join(host_presets())}"
    )


def host_presets() -> tuple[str, ...]:
    """Return the names of the hosts that ship with the package, from datasheets."""
    return preset_names("hosts")


def load_hosts(path: str | os.PathLike[str]) -> Hosts:
    """Read a hosts file and check it; raises ``FormatError`` or ``StorageError``."""
    hosts = serial.load(Hosts, Path(path))
    check_hosts(hosts, where=f"{path}: $")
    return hosts


def check_hosts(hosts: Hosts, *, where: str = "$") -> None:
    """Return if ``hosts`` can be planned for.

    Raises:
        FormatError: names the first field that makes no sense and what to write instead.
    """
    serial.check_types(hosts, where=where)
    for i, host in enumerate(hosts.hosts):
        check_machine(host.machine, where=f"{where}.hosts[{i}].machine")
    for path, problem in _problems(hosts):
        raise FormatError(f"{where}{path}: {problem}")


def _problems(hosts: Hosts) -> Iterator[tuple[str, str]]:
    """Yield ``(path below the hosts, what is wrong with it)``."""
    if not 1 <= len(hosts.hosts) <= MAX_KINDS:
        yield ".hosts", f"there are {len(hosts.hosts)} kinds of hosts; give 1 to {MAX_KINDS}"
    for i, host in enumerate(hosts.hosts):
        path = f".hosts[{i}]"
        if not host.name or len(host.name) > 64 or not host.name.isprintable() or "." in host.name:
            wrong = f"{ascii(host.name)[:200]} is no name of a host"
            yield f"{path}.name", f"{wrong}; write a short one without a dot, such as 'h0'"
        for field, number in (("ranks", host.ranks), ("count", host.count)):
            if not 1 <= number <= MAX_RANKS:
                yield f"{path}.{field}", f"the number is {number}; give 1 to {MAX_RANKS}"
        if host.ranks > 1 and host.peers is None:
            yield f"{path}.peers", f"{host.ranks} ranks need to say what lies between them"
        if host.peers is not None:
            yield from _bad_interconnect(host.peers, f"{path}.peers")
        pipes = {pipe.name for pipe in host.machine.pipes}
        for k, name in enumerate(host.shared):
            if name not in pipes:
                yield f"{path}.shared[{k}]", f"the machine has no pipe '{name}'; add it to pipes"
    if hosts.num_ranks > MAX_RANKS:
        yield ".hosts", f"there are {hosts.num_ranks} ranks; give at most {MAX_RANKS}"
        return
    if hosts.num_hosts > 1 and hosts.network is None:
        yield ".network", f"{hosts.num_hosts} hosts need to say what lies between them"
    if hosts.network is not None:
        yield from _bad_interconnect(hosts.network, ".network")
    seen: set[str] = set()
    for rank in hosts.ranks():
        if rank.name in seen:
            yield ".hosts", f"two ranks are called '{rank.name}'; give the hosts other names"
        seen.add(rank.name)


def _bad_interconnect(interconnect: Interconnect, path: str) -> Iterator[tuple[str, str]]:
    rates = [(f"{path}.bytes_per_second", interconnect.bandwidth_bytes_per_s)]
    if interconnect.total_bytes_per_s:
        rates.append((f"{path}.total_bytes_per_second", interconnect.total_bytes_per_s))
    before = 0
    for k, point in enumerate(interconnect.points):
        rates.append((f"{path}.points[{k}].bytes_per_second", point.bandwidth_bytes_per_s))
        if point.size_bytes <= before:
            yield f"{path}.points[{k}].bytes", f"{point.size_bytes} is not above {before}"
        before = point.size_bytes
    low, high = _RATES
    for where, rate in rates:
        if not (math.isfinite(rate) and low <= rate <= high):
            yield where, f"the rate {rate} per second is not within {low:g} and {high:g}"
    if not 0 <= interconnect.latency_s <= _MAX_LATENCY_S:
        wrong = f"the fixed cost {interconnect.latency_s} is not within 0 and {_MAX_LATENCY_S:g} seconds"
        yield f"{path}.latency_seconds", wrong
