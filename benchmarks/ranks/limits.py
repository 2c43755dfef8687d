"""What one rank may have of this machine: cores, memory, a drive's speed and a network of its own.

All is held by the kernel, through control groups and network namespaces, for which root is needed. What cannot be had
is left out and said by ``missing``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_PERIOD_US = 20_000
_TRIES, _PAUSE_S = 50, 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one rank; ``None`` for what the machine has."""

    cores: float | None = None
    memory_bytes: int | None = None
    drives: Mapping[str, float] = field(default_factory=dict)
    """Bytes per second, read and written each, by ``major:minor`` of a block device."""
    namespace: str = ""


class Confined:
    """The control groups of one rank, or of several that share them. Removed with all that runs in them."""

    def __init__(self, limits: Limits) -> None:
        """Make the groups.

        Raises:
            OSError: they cannot be made.
        """
        self._namespace = limits.namespace
        self._name = f"gascompile-{uuid.uuid4().hex[:10]}"
        self._groups: dict[str, Path] = {}
        try:
            if limits.cores is not None:
                self._make("cpu")
                self.give_cores(limits.cores)
            if limits.memory_bytes is not None:
                group = self._make("memory")
                (group / "memory.limit_in_bytes").write_text(str(limits.memory_bytes))
            if limits.drives:
                self._make("blkio")
                for device, bytes_per_s in limits.drives.items():
                    self.give_drive(device, bytes_per_s)
        except OSError:
            self.remove()
            raise

    def _make(self, kind: str) -> Path:
        group = self._groups[kind] = _ROOT / kind / self._name
        group.mkdir()
        return group

    @property
    def cpu_group(self) -> str:
        """Return the folder of the cores, for who changes them from within."""
        return str(self._groups.get("cpu", ""))

    def give_cores(self, cores: float) -> None:
        """Hold all within to so many cores."""
        give_cores(self._groups["cpu"], cores)

    def give_drive(self, device: str, bytes_per_s: float) -> None:
        """Hold reads and writes of a device to a speed each; 0 for no limit."""
        for direction in ("read", "write"):
            limit = self._groups["blkio"] / f"blkio.throttle.{direction}_bps_device"
            limit.write_text(f"{device} {int(bytes_per_s)}")

    def entered(self, command: Sequence[str]) -> list[str]:
        """Return ``command`` as it is run within the limits."""
        if self._namespace:
            # Hosts have names of their own, by which ranks know who shares their memory.
            named = f'hostname {self._namespace} && exec "$@"'
            command = ["unshare", "--uts", "/bin/sh", "-c", named, "sh", *command]
            command = ["ip", "netns", "exec", self._namespace, *command]
        if not self._groups:
            return list(command)
        enter = "".join(f"echo $$ > {group}/cgroup.procs && " for group in self._groups.values())
        return ["/bin/sh", "-c", f'{enter}exec "$@"', "sh", *command]

    def peak_bytes(self) -> int | None:
        """Return the most memory of the group so far, files of the page cache included."""
        if "memory" not in self._groups:
            return None
        return int((self._groups["memory"] / "memory.max_usage_in_bytes").read_text())

    def remove(self) -> None:
        """End what runs within, and remove the groups; a process that a drive holds up keeps its group."""
        for group in self._groups.values():
            for _ in range(_TRIES):
                with contextlib.suppress(OSError):
                    for process in (group / "cgroup.procs").read_text().split():
                        os.kill(int(process), signal.SIGKILL)
                try:
                    group.rmdir()
                except FileNotFoundError:
                    break
                except OSError:
                    time.sleep(_PAUSE_S)
                else:
                    break


def give_cores(group: Path, cores: float) -> None:
    """Hold all in a group of ``cpu`` to so many cores."""
    (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
    (group / "cpu.cfs_quota_us").write_text(str(int(cores * _PERIOD_US)))


def missing() -> str:
    """Return why limits cannot be had here; empty where they can."""
    try:
        Confined(Limits(cores=1.0, memory_bytes=1 << 30)).remove()
    except OSError as error:
        return f"no control groups of version 1 can be made: {error}"
    return ""


@contextlib.contextmanager
def network(bytes_per_s: float | None) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Yield the namespaces of two hosts and what their processes need to know; the loopback for ``None``.

    Each end of the wire sends ``bytes_per_s`` at most.

    Raises:
        OSError: namespaces cannot be made.
    """
    if bytes_per_s is None:
        yield ["", ""], {"MASTER_ADDR": "127.0.0.1"}
        return
    name = uuid.uuid4().hex[:6]
    hosts = [f"gas-{name}-{side}" for side in "ab"]
    wires = [f"gas{name}{side}" for side in "ab"]
    try:
        for host in hosts:
            _do("ip", "netns", "add", host)
        _do("ip", "link", "add", wires[0], "type", "veth", "peer", "name", wires[1])
        for number, (host, wire) in enumerate(zip(hosts, wires, strict=True), 1):
            _do("ip", "link", "set", wire, "netns", host, "name", "wire0")
            within = ("ip", "netns", "exec", host)
            _do(*within, "ip", "addr", "add", f"10.77.0.{number}/24", "dev", "wire0")
            for device in ("lo", "wire0"):
                _do(*within, "ip", "link", "set", device, "up")
            shape = f"tbf rate {int(8 * bytes_per_s)}bit burst 256kb latency 400ms"
            _do(*within, "tc", "qdisc", "add", "dev", "wire0", "root", *shape.split())
        yield hosts, {"MASTER_ADDR": "10.77.0.1", "GLOO_SOCKET_IFNAME": "wire0"}
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host], check=False, capture_output=True)


def _do(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
