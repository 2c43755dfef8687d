"""Refuses a machine whose numbers make no sense, with the JSON path of the first one.

It reads plain data and no file: what a user writes and what a user builds in Python pass the same checks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from gascompile.errors import FormatError
from gascompile.ir import Machine


def check_machine(machine: Machine, *, where: str = "$") -> None:
    """Return if ``machine`` can be planned for.

    Args:
        machine: tiers, links, pipes and rates from a file or from Python.
        where: what stands before a field's name in a message.

    Raises:
        FormatError: names the first field that makes no sense and what to write instead.
    """
    for path, problem in _problems(machine):
        raise FormatError(f"{where}{path}: {problem}")


def _problems(machine: Machine) -> Iterator[tuple[str, str]]:
    """Yield ``(path below the machine, what is wrong with it)``."""
    if machine.compute_tier not in machine.tiers:
        yield ".tiers", "a machine needs a tier 'gpu' or 'cpu' that computes"
    for name, tier in machine.tiers.items():
        if tier.size_bytes < 0:
            yield (
                f".tiers.{name}.bytes",
                f"the tier has the size {tier.size_bytes}; give zero or more",
            )
    yield from _bad_links(machine)
    if machine.io.num_threads < 1 or machine.io.chunk_bytes < 1:
        yield ".io", "io needs at least one thread and a chunk of at least one byte"
    yield from _bad_rates(machine)


def _bad_links(machine: Machine) -> Iterator[tuple[str, str]]:
    pipes = {pipe.name for pipe in machine.pipes}
    for i, link in enumerate(machine.links):
        for field, end in (("from", link.source_tier), ("to", link.target_tier)):
            if end not in machine.tiers:
                yield f".links[{i}].{field}", f"the machine has no tier '{end}'"
        for k, name in enumerate(link.shared):
            if name not in pipes:
                yield f".links[{i}].shared[{k}]", f"the machine has no pipe '{name}'"


def _bad_rates(machine: Machine) -> Iterator[tuple[str, str]]:
    rates = [
        (f".links[{i}].bytes_per_second", x.bandwidth_bytes_per_s)
        for i, x in enumerate(machine.links)
    ]
    rates += [
        (f".pipes[{i}].bytes_per_second", x.bandwidth_bytes_per_s)
        for i, x in enumerate(machine.pipes)
    ]
    rates += [(f".rates[{i}].flops_per_second", x.flops_per_s) for i, x in enumerate(machine.rates)]
    rates += [
        (f".memory[{i}].bytes_per_second", x.bandwidth_bytes_per_s)
        for i, x in enumerate(machine.memory)
    ]
    for path, value in rates:
        if not (math.isfinite(value) and value > 0):
            yield path, f"the rate {value} is not a positive number"
    costs = [(f".links[{i}].latency_seconds", x.latency_s) for i, x in enumerate(machine.links)]
    costs += [
        (f".memory[{i}].op_overhead_seconds", x.op_overhead_s) for i, x in enumerate(machine.memory)
    ]
    for path, value in costs:
        if not (math.isfinite(value) and value >= 0):
            yield path, f"the fixed cost {value} is not zero or more"
