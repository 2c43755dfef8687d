"""Refuses a machine whose numbers make no sense, with the JSON path of the first one.

It reads plain data and no file: what a user writes and what a user builds in Python pass the same checks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from gascompile.core import serial
from gascompile.core.errors import FormatError
from gascompile.core.machine import InterferencePoint, Machine, PlaceKind
from gascompile.core.sizes import MAX_SIZE_BYTES

COMPUTING_KINDS = (PlaceKind.GPU, PlaceKind.CPU)
"""Which kinds of places compute; the first of them that a machine has does."""
BACKENDS = {
    "": COMPUTING_KINDS,
    "cpu": (PlaceKind.CPU,),
    "cuda": (PlaceKind.GPU,),
    "emulated": (PlaceKind.GPU,),
}
"""Which kind of place may compute, by the backend that executes."""
_MAX_NAME = 64  # letters, which stand in tables and messages
ENGINES = ("reads", "kvikio")
RECOSTED = "re-costed"
"""What the source of settings starts with that are not those the machine was measured with."""
MAX_THREADS = 1024  # that read files: each is started
MAX_CHUNK_BYTES = 1 << 30  # of one read
_RATE_RANGE = (1.0, 1e21)
_MAX_FIXED_COST_S = 3600.0  # an hour; drives take micro- to milliseconds
_MOST_PIPE_BYTES = 1e6  # drives take 1 to 10
_MAX_WATTS = 1e6  # a megawatt; processors take hundreds of watts
_MAX_JOULES_PER_BYTE = 1.0  # links take nanojoules


def check_machine(machine: Machine, *, where: str = "$") -> None:
    """Return if ``machine`` can be planned for.

    Args:
        machine: places, links, pipes and rates from a file or from Python.
        where: what stands before a field's name in a message.

    Raises:
        FormatError: names the first field that makes no sense and what to write instead.
    """
    serial.check_types(machine, where=where)
    for path, problem in _problems(machine):
        raise FormatError(f"{where}{path}: {problem}")


def source_warnings(machine: Machine) -> tuple[str, ...]:
    """Return a warning where rates of ``machine`` come from measurements and from datasheets, or from neither.

    Capacities are left out: they are facts either way, while a measured rate next to a datasheet's peak
    lets a plan prefer what nobody measured.
    """
    places: dict[str, list[str]] = {"measured": [], "datasheet": []}
    for field in ("links", "pipes", "rates", "memory"):
        for i, item in enumerate(getattr(machine, field)):
            for kind, of_kind in places.items():
                if item.source.startswith(kind):
                    of_kind.append(f"{field}[{i}]")
    measured, datasheet = places["measured"], places["datasheet"]
    recosted = (machine.io.source,) if machine.io.source.startswith(RECOSTED) else ()
    if not measured or not datasheet:
        return recosted
    warning = (
        f"machine '{machine.name}' mixes measured rates ({_some(measured)}) with those of datasheets "
        f"({_some(datasheet)}), which real hardware does not reach: measure the rest as well, or take all "
        f"from datasheets"
    )
    return (warning, *recosted)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _problems(machine: Machine) -> Iterator[tuple[str, str]]:
    """Yield ``(path below the machine, what is wrong with it)``."""
    yield from _bad_places(machine)
    if machine.backend not in BACKENDS:
        known = ", ".join(name for name in BACKENDS if name)
        yield ".backend", f"there is no backend '{machine.backend}'; choose one of {known}"
    site = machine.compute_tier
    if machine.tiers[site].kind not in BACKENDS[machine.backend]:
        wrong = f"'{machine.backend}' does not compute on the place '{site}'"
        yield ".backend", f"{wrong}; name another backend, or give the machine its place"
    yield from _bad_names(machine)
    yield from _bad_links(machine)
    if machine.io.num_threads < 1 or machine.io.chunk_bytes < 1:
        yield ".io", "io needs at least one thread and a chunk of at least one byte"
    if machine.io.num_threads > MAX_THREADS or machine.io.chunk_bytes > MAX_CHUNK_BYTES:
        most = f"at most {MAX_THREADS} threads and {MAX_CHUNK_BYTES} bytes in a chunk"
        yield (
            ".io",
            f"io has {machine.io.num_threads} threads and chunks of {machine.io.chunk_bytes}; give {most}",
        )
    if machine.io.least_bytes < 0:
        yield ".io.least_bytes", f"the size is {machine.io.least_bytes}; give zero or more"
    if machine.io.engine not in ENGINES:
        known = ", ".join(ENGINES)
        yield ".io.engine", f"there is no engine '{machine.io.engine}'; choose one of {known}"
    for i, memory in enumerate(machine.memory):
        if not 0 <= memory.library_bytes <= MAX_SIZE_BYTES:
            wrong = f"libraries take {memory.library_bytes} bytes; give zero or more"
            yield f".memory[{i}].library_bytes", wrong
    if not 0 <= machine.interference.op_s_per_byte < math.inf:
        yield (
            ".interference.op_s_per_byte",
            f"ops lose {machine.interference.op_s_per_byte} seconds per byte; give zero or more",
        )
    yield from _bad_points(".interference", machine.interference.points)
    if machine.contention is not None:
        yield from _bad_points(".contention", machine.contention.points)
        for name in ("start_s", "give_s", "give_s_per_byte", "wake_s"):
            if not 0 <= (amount := getattr(machine.contention, name)) < math.inf:
                yield f".contention.{name}", f"it takes {amount} seconds; give zero or more"
    yield from _bad_rates(machine)
    yield from _bad_costs(machine)
    yield from _bad_energy(machine)


def _bad_points(where: str, points: Sequence[InterferencePoint]) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with shares that are lost."""
    for i, point in enumerate(points):
        path = f"{where}.points[{i}]"
        if not 0 <= point.lost_share < 1:
            yield path, f"the lost share is {point.lost_share}; give zero or more, below one"
        if not 0 <= point.flops_per_byte < math.inf:
            yield path, f"the intensity is {point.flops_per_byte}; give zero or more"


def _bad_places(machine: Machine) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with the places: one computes, each has a name of its own, of which links are made."""
    kind = next((k for k in COMPUTING_KINDS for p in machine.places if p.kind is k), None)
    if kind is None:
        yield ".places", "a machine needs a place of the kind 'gpu' or 'cpu' that computes"
    computing = [place.name for place in machine.places if place.kind is kind]
    if len(computing) > 1:
        several = f"'{computing[0]}' and '{computing[1]}' are both of the kind '{kind}'"
        yield ".places", f"{several}, and one place computes in a plan; describe one of them"
    first: dict[str, int] = {}
    for i, place in enumerate(machine.places):
        path, name = f".places[{i}]", place.name
        if not name or len(name) > _MAX_NAME or not name.isprintable() or "->" in name:
            wrong = f"{ascii(name)[:200]} is no name of a place"
            yield f"{path}.name", f"{wrong}; write a short one, such as 'h0.nvme0', without '->'"
        if first.setdefault(name, i) != i:
            yield f"{path}.name", f"places[{first[name]}] is called '{name}' as well; rename one"
        if place.size_bytes < 0:
            yield f"{path}.bytes", f"the place has the size {place.size_bytes}; give zero or more"
        if place.size_bytes > MAX_SIZE_BYTES:
            most = f"give at most {MAX_SIZE_BYTES}"
            yield f"{path}.bytes", f"the place has the size {place.size_bytes}; {most}"


def _bad_links(machine: Machine) -> Iterator[tuple[str, str]]:
    pipes = {pipe.name for pipe in machine.pipes}
    places = machine.tiers
    first: dict[str, int] = {}
    for i, link in enumerate(machine.links):
        for field, end in (("from", link.source_tier), ("to", link.target_tier)):
            if end not in places:
                known = ", ".join(places)
                yield f".links[{i}].{field}", f"the machine has no place '{end}'; it has {known}"
        if link.source_tier == link.target_tier:
            yield f".links[{i}]", f"the link goes from '{link.source_tier}' to itself; remove it"
        if first.setdefault(link.name, i) != i:
            twin = f"links[{first[link.name]}] is called {link.name} as well"
            yield f".links[{i}]", f"{twin}; keep one of them, with the bandwidth of both"
        for k, name in enumerate(link.shared):
            if name not in pipes:
                yield (
                    f".links[{i}].shared[{k}]",
                    f"the machine has no pipe '{name}'; add it to pipes",
                )


def _bad_names(machine: Machine) -> Iterator[tuple[str, str]]:
    """Yield what else is named twice."""
    named = {
        "pipes": [f"pipe '{pipe.name}'" for pipe in machine.pipes],
        "rates": [f"{rate.dtype} on '{rate.device}'" for rate in machine.rates],
        "memory": [f"device '{rate.device}'" for rate in machine.memory],
    }
    for field, names in named.items():
        first: dict[str, int] = {}
        for i, name in enumerate(names):
            if first.setdefault(name, i) != i:
                yield (
                    f".{field}[{i}]",
                    f"{field}[{first[name]}] has {name} as well; keep one of them",
                )


def _bad_rates(machine: Machine) -> Iterator[tuple[str, str]]:
    speeds = [("links", i, link.bandwidth_bytes_per_s) for i, link in enumerate(machine.links)]
    speeds += [("pipes", i, pipe.bandwidth_bytes_per_s) for i, pipe in enumerate(machine.pipes)]
    speeds += [("memory", i, rate.bandwidth_bytes_per_s) for i, rate in enumerate(machine.memory)]
    rates = [(f".{field}[{i}].bytes_per_second", value) for field, i, value in speeds]
    rates += [(f".rates[{i}].flops_per_second", x.flops_per_s) for i, x in enumerate(machine.rates)]
    for i, compute in enumerate(machine.rates):
        before = 0.0
        for k, point in enumerate(compute.points):
            rates.append((f".rates[{i}].points[{k}].flops_per_second", point.flops_per_s))
            if not before < point.flops_per_byte:
                yield (
                    f".rates[{i}].points[{k}].flops_per_byte",
                    f"{point.flops_per_byte} is not above {before}",
                )
            before = point.flops_per_byte
    least, most = _RATE_RANGE
    for path, value in rates:
        if not (math.isfinite(value) and value > 0):
            yield path, f"the rate {value} is not a positive number"
        if not least <= value <= most:
            yield path, f"the rate {value} per second is not within {least:g} and {most:g}"


def _bad_costs(machine: Machine) -> Iterator[tuple[str, str]]:
    costs = [(f".links[{i}].latency_seconds", x.latency_s) for i, x in enumerate(machine.links)]
    costs += [
        (f".memory[{i}].op_overhead_seconds", x.op_overhead_s) for i, x in enumerate(machine.memory)
    ]
    for i, link in enumerate(machine.links):
        if not 1 <= link.pipe_bytes(1) <= _MOST_PIPE_BYTES:
            yield (
                f".links[{i}].pipe_bytes_per_byte",
                f"a byte takes {link.pipe_bytes(1)} bytes of its pipes, which is not within 1 and {_MOST_PIPE_BYTES}",
            )
    for path, value in costs:
        if not 0 <= value <= _MAX_FIXED_COST_S:
            yield path, f"the fixed cost {value} is not within 0 and {_MAX_FIXED_COST_S:g} seconds"


def _bad_energy(machine: Machine) -> Iterator[tuple[str, str]]:
    if machine.energy is None:
        return
    processors, links = machine.energy.processors, machine.energy.links
    # A link that the machine has lost may stand there: nothing moves over it.
    for field, names in (
        ("processors", [p.device for p in processors]),
        ("links", [x.link for x in links]),
    ):
        for i, name in enumerate(names):
            if name in names[:i]:
                yield f".energy.{field}[{i}]", f"'{name}' stands in it twice; keep one of them"
    for i, power in enumerate(processors):
        if power.device not in machine.tiers:
            known = ", ".join(machine.tiers)
            wrong = f"the machine has no place '{power.device}'"
            yield f".energy.processors[{i}].device", f"{wrong}; it has {known}"
        if not 0 <= power.idle_w <= power.busy_w <= _MAX_WATTS:
            wrong = f"it draws {power.idle_w} watts idle and {power.busy_w} busy"
            yield f".energy.processors[{i}]", f"{wrong}; give 0 <= idle <= busy <= {_MAX_WATTS:g}"
    for i, link in enumerate(links):
        if not 0 <= link.joules_per_byte <= _MAX_JOULES_PER_BYTE:
            wrong = f"a byte takes {link.joules_per_byte} joules"
            most = f"give 0 or more, at most {_MAX_JOULES_PER_BYTE:g}"
            yield f".energy.links[{i}].joules_per_byte", f"{wrong}; {most}"
