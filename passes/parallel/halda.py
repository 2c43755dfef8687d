"""Halda: prima.cpp's own rule for a ring of unequal devices, as a baseline that our clock prices.

Per device m: w_m layers per round and n_m of them in the GPU, k = L / sum w rounds. Devices whose layers overflow RAM
pay each layer beside the GPU with a read from the drive, without overlap:

    minimise k sum (a_m w_m + b_m n_m),  sum w_m = L / k,  w_m >= 1,  n_m <= w_m,  n_m <= GPU layers / k
    overflowing:  w_m - n_m >= RAM layers / k        others:  w_m - n_m <= RAM layers / k

Which devices overflow follows from the last solution, until it no longer changes; where GPU memory is left over while
layers overflow, the one with the slowest drive may not overflow. Devices with one layer are dropped and the rest solved
again. What it finds runs with the most overlap that its windows allow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from gascompile.passes.bounds.linear_program import Ending, LinearProgram
from gascompile.passes.parallel.ring_clock import Ring, Share, fill, ring_seconds
from gascompile.passes.parallel.ring_problem import RingProblem

_MIN_DRIVE_S = 0.1e9
"""Bytes per second below which the rule lets no layers overflow."""
_MAX_TURNS = 40
"""The rule's own loop has no limit; where its sets alternate, the last solution stands."""
Windows = tuple[int, list[int], list[int]]
"""Rounds, layers per round, of which in the GPU."""


def halda(problem: RingProblem, head: int) -> Ring | None:
    """Return the ring that the rule chooses with device ``head`` as the first, or ``None`` where it finds none."""
    kept = list(range(len(problem.devices)))
    while kept:
        windows = _assign(problem, kept, head)
        if windows is None:
            return None
        rounds, layers, in_gpu = windows
        strong = [m for m, w in zip(kept, layers, strict=True) if w > 1 or m == head]
        if len(strong) == len(kept):
            return _as_ring(problem, kept, head, (rounds, layers, in_gpu))
        kept = strong
    return None


def _assign(problem: RingProblem, kept: Sequence[int], head: int) -> Windows | None:
    layers = problem.chain.num_layers
    rooms = [problem.room(m, (head, False)) for m in kept]
    memory = [max(ram, 0) for _, ram in rooms]
    sizes = [problem.devices[m].ram_bytes for m in kept]
    per_round = [max(1, round(size / (sum(sizes) or 1) * layers)) for size in sizes]
    per_round[sizes.index(max(sizes))] += layers - sum(per_round)
    in_gpu = [w if room[0] > 0 else 0 for w, room in zip(per_round, rooms, strict=True)]
    last: Windows | None = None
    before: list[bool] | None = None
    forced: set[int] = set()
    rounds = 1
    for _ in range(_MAX_TURNS):
        over = [
            i not in forced
            and (w - n) * rounds > memory[i]
            and problem.devices[m].load_s <= problem.chain.layer.weight_bytes / _MIN_DRIVE_S
            for i, (m, w, n) in enumerate(zip(kept, per_round, in_gpu, strict=True))
        ]
        if over == before:
            break
        before = over
        windows = _solve(problem, kept, rooms, over)
        if windows is None:
            break
        if (worst := _to_force(problem, kept, rooms, over, windows)) is not None:
            forced.add(worst)
            before = None
            rounds, per_round, in_gpu = windows
            continue
        if windows == last:
            break
        last = windows
        rounds, per_round, in_gpu = windows
    return last


def _to_force(
    problem: RingProblem,
    kept: Sequence[int],
    rooms: Sequence[tuple[int, int]],
    over: Sequence[bool],
    windows: Windows,
) -> int | None:
    """Return which device may no longer overflow: layers do, while a GPU has room and none is weak."""
    rounds, per_round, in_gpu = windows
    if any(w == 1 and not n for w, n in zip(per_round, in_gpu, strict=True)):
        return None
    free = any(room[0] > 0 and n < room[0] // rounds for room, n in zip(rooms, in_gpu, strict=True))
    spills = any(
        w > n if room[0] > 0 else is_over
        for room, w, n, is_over in zip(rooms, per_round, in_gpu, over, strict=True)
    )
    candidates = [i for i, is_over in enumerate(over) if is_over]
    if not (free and spills and candidates):
        return None
    return max(candidates, key=lambda i: problem.devices[kept[i]].load_s)


def _solve(
    problem: RingProblem,
    kept: Sequence[int],
    rooms: Sequence[tuple[int, int]],
    over: Sequence[bool],
) -> Windows | None:
    """Return the best windows over all rounds that divide the layers; ``None`` where none fit these sets."""
    layers = problem.chain.num_layers
    best: tuple[float, Windows] | None = None
    for rounds in (k for k in range(1, layers // 2 + 1) if layers % k == 0):
        program = LinearProgram("halda")
        windows, gpus = [], []
        for i, m in enumerate(kept):
            device, (gpu_room, ram_room) = problem.devices[m], rooms[i]
            load_s = device.load_s if over[i] else 0.0
            gain = device.gpu_s - device.ram_s - load_s if gpu_room > 0 else 0.0
            w = program.add_variable(1, layers, cost=rounds * (device.ram_s + load_s), integer=True)
            n = program.add_variable(
                0, max(gpu_room, 0) // rounds, cost=rounds * gain, integer=True
            )
            program.add_row(0, math.inf, [(w, 1), (n, -1)])
            room = max(ram_room, 0) / rounds
            program.add_row(
                room if over[i] else -math.inf, math.inf if over[i] else room, [(w, 1), (n, -1)]
            )
            windows.append(w)
            gpus.append(n)
        program.add_row(layers // rounds, layers // rounds, [(w, 1) for w in windows])
        outcome = program.solve(time_limit_s=10.0, max_nodes=10_000)
        if outcome.ending is Ending.INFEASIBLE or not outcome.values:
            continue
        if best is None or outcome.objective < best[0] - 1e-12:
            read = [[round(outcome.values[c]) for c in columns] for columns in (windows, gpus)]
            best = outcome.objective, (rounds, read[0], read[1])
    return best[1] if best else None


def _as_ring(problem: RingProblem, kept: Sequence[int], head: int, windows: Windows) -> Ring | None:
    """Return the rule's windows as shares, with the slots per device that the clock likes best."""
    rounds, per_round, in_gpu = windows
    shares = [Share()] * len(problem.devices)
    at = (head, False)
    for m, w, n in zip(kept, per_round, in_gpu, strict=True):
        beside = (w - n) * rounds
        room = problem.parts_room(m, at, beside)
        filled = [fill(problem, m, at, n * rounds, beside, slots) for slots in _slots(room)]
        options = [share for share in filled if share is not None]
        if not options:
            return None
        seconds = [
            ring_seconds(problem, Ring((*shares[:m], share, *shares[m + 1 :]), rounds, at))
            for share in options
        ]
        shares[m] = options[seconds.index(min(seconds))]
    return Ring(tuple(shares), rounds, at)


def _slots(room: int) -> list[int]:
    """Return numbers of slots to try, up to all room there is."""
    return sorted({1, *(room * share // 16 for share in range(1, 13))} - {0})
