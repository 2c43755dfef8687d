"""What plans are made for, as digests: a machine, a budget on it, and options. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping

from gascompile.core import serial
from gascompile.core.config import CompileConfig
from gascompile.core.machine import Machine
from gascompile.formats.allocation import packing_fields


def target_prints(
    machine: Machine, limits_bytes: Mapping[str, int], config: CompileConfig | None
) -> dict[str, str]:
    """Return the digests of what a plan of any source is made for, by part; of options, where some shape it."""
    prints = {"machine": serial.digest(machine), "budget": serial.digest(limits_bytes)}
    if config is not None:
        prints["options"] = serial.digest({**config.fingerprint_fields(), **packing_fields()})
    return prints
