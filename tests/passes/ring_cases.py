"""Small rings of unequal devices, and every placement of their layers, as an oracle."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

from gascompile.passes.parallel.chain import Block, Chain
from gascompile.passes.parallel.ring_clock import Ring, Share
from gascompile.passes.parallel.ring_problem import RingDevice, RingProblem

SIZE = 10_000_000_000


def device(
    name: str,
    *,
    gpu: int = 0,
    ram: int = 2,
    gpu_s: float = 1.0,
    ram_s: float = 4.0,
    load_s: float = 8.0,
    head_s: float = 1.0,
) -> RingDevice:
    """Return a device with room for ``gpu`` and ``ram`` layers of ten gigabytes."""
    inf = float("inf")
    return RingDevice(
        rank=name,
        host=name,
        gpu_bytes=gpu * SIZE,
        ram_bytes=ram * SIZE,
        gpu_s=gpu_s if gpu else inf,
        ram_s=ram_s,
        load_s=load_s,
        head_gpu_s=inf,
        head_ram_s=head_s,
        on_gpu=False,
    )


def problem(
    devices: list[RingDevice], layers: int, *, hop_s: float = 0.5, parts: int = 1
) -> RingProblem:
    """Return a ring whose head takes no room."""
    count = len(devices)
    hops = tuple(tuple(0.0 if a == b else hop_s for b in range(count)) for a in range(count))
    end = Block(name="end", num_ops=1)
    chain = Chain(
        name="toy",
        first=end,
        layer=Block(name="layer", weight_bytes=SIZE, num_ops=1),
        num_layers=layers,
        last=end,
    )
    return RingProblem(chain=chain, devices=tuple(devices), hops_s=hops, parts=parts)


def random_problem(seed: int) -> RingProblem:
    """Return two or three devices and up to six layers, more than fit in memory in most cases."""
    chance = random.Random(seed)
    count = chance.choice([1, 2, 2, 3])
    devices = [
        device(
            f"h{i}",
            gpu=chance.choice([0, 0, 1, 2]),
            ram=chance.choice([1, 1, 2]),
            gpu_s=chance.choice([0.5, 1.0]),
            ram_s=chance.choice([2.0, 3.0, 4.0]),
            load_s=chance.choice([1.0, 4.0, 10.0, float("inf")]),
        )
        for i in range(count)
    ]
    devices[0] = device("h0", gpu=1, ram=2, load_s=6.0)
    layers = chance.randint(3, 6 if count < 3 else 5)
    return problem(devices, layers, hop_s=chance.choice([0.0, 0.25, 1.0]))


def every_ring(task: RingProblem) -> Iterator[Ring]:
    """Yield every placement that the rows of the program allow, in every number of rounds."""
    layers = task.chain.num_layers
    options = [[*_shares(task, i, layers)] for i in range(len(task.devices))]
    for shares in itertools.product(*options):
        if sum(share.layers for share in shares) != layers:
            continue
        for rounds in range(1, layers + 1):
            for head, in_gpu in task.heads():
                yield Ring(tuple(shares), rounds, (head, in_gpu))


def _shares(task: RingProblem, number: int, layers: int) -> Iterator[Share]:
    gpu_room, ram_room = task.room(number, (-1, False))
    drive = task.devices[number].load_s < float("inf")
    for gpu, beside in itertools.product(range(min(gpu_room, layers) + 1), range(layers + 1)):
        if gpu + beside > layers:
            continue
        if beside <= ram_room:
            yield Share(gpu, beside)
        for slots in range(1, ram_room + 1) if drive else ():
            for streamed in range(slots, beside + 1):
                if beside - streamed + slots <= ram_room:
                    yield Share(gpu, beside, streamed, slots)
