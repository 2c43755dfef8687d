"""What a GPU's allocator counts more than a plan: against a simple model of the allocator, value by value."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from gascompile.core.machine import Machine, Place
from gascompile.core.sizes import MIB
from gascompile.core.workload import OpSpec, TensorKind, TensorSpec, Workload
from gascompile.passes.model.rounding import rounding_bytes
from tests.training.devices import EMULATED

Names = tuple[str, ...]
CUDA: Machine = replace(EMULATED, backend="cuda").with_place(Place.named("gpu", 1 << 40))


def workload(sizes: dict[str, int], ops: Sequence[tuple[Names, Names]]) -> Workload:
    kinds = {"w": TensorKind.WEIGHT, "x": TensorKind.INPUT, "y": TensorKind.OUTPUT}
    tensors = tuple(
        TensorSpec(name=name, size_bytes=size, kind=kinds.get(name[0], TensorKind.ACTIVATION))
        for name, size in sizes.items()
    )
    specs = tuple(
        OpSpec(name=f"op{i}", time_s={"gpu": 1.0}, reads=reads, writes=writes)
        for i, (reads, writes) in enumerate(ops)
    )
    return Workload(name="made", repeats=True, tensors=tensors, ops=specs)


def test_other_machines_count_every_byte() -> None:
    made = workload({"x": 3, "y": 5}, [(("x",), ("y",))])
    assert rounding_bytes(made, EMULATED) == 0
    assert rounding_bytes(made, CUDA) == 509 + 507 + 4096


@pytest.mark.parametrize("seed", range(30))
def test_blocks_of_what_is_alive_at_once_are_covered(seed: int) -> None:
    draw = random.Random(seed)
    names = [f"a{i}" for i in range(12)]
    sizes = {name: draw.choice([1, 512, 513, 5000, MIB - 1]) for name in names}
    sizes |= {"w0": 700, "x0": 3, "y0": 1025}
    ops = [(tuple(draw.sample(names[:i], min(i, 2))) or ("x0",), (names[i],)) for i in range(12)]
    ops.append((("a11", "w0"), ("y0",)))
    made = workload(sizes, ops)
    last = {name: i for i, (reads, writes) in enumerate(ops) for name in (*reads, *writes)}
    alive, counted, planned = {"w0", "x0", "y0"}, [], []
    for i, (_, writes) in enumerate(ops):
        alive.update(writes)
        counted.append(sum(-(-sizes[name] // 512) * 512 for name in alive))
        planned.append(sum(sizes[name] for name in alive))
        alive -= {name for name in alive if name[0] == "a" and last[name] == i}
    assert max(counted) <= max(planned) + rounding_bytes(made, CUDA)


def test_large_blocks_may_be_looser_than_their_values() -> None:
    ops = [(("x",), ("a",)), (("a",), ("y",))]
    made = workload({"x": MIB, "a": 3 * MIB, "y": 2 * MIB}, ops)
    assert rounding_bytes(made, CUDA) == 3 * MIB + 4096
    many = {f"a{i}": 2 * MIB for i in range(40)}
    made = workload({"x": 512, **many, "y": 512}, [(("x",), tuple(many)), (tuple(many), ("y",))])
    assert rounding_bytes(made, CUDA) == 32 * MIB + 4096
