"""A weight of a drive may wait in the memory in between, which is a place of its own."""

from __future__ import annotations

import dataclasses

import pytest

from gascompile.core.errors import PlanVerificationError
from gascompile.core.machine import Link, Place
from gascompile.core.plan import Plan
from gascompile.core.steps import Reload, Step
from tests.passes.test_heap import MACHINE, Ops, back, drop, heap, out, plan_of, runs, wait

WITH_DRIVE = dataclasses.replace(
    MACHINE,
    places=(*MACHINE.places, Place.named("nvme", 100)),
    links=(
        *MACHINE.links,
        Link(source_tier="nvme", target_tier="gpu", bandwidth_bytes_per_s=1.0),
    ),
)
TWO_HOPS: list[Step] = [
    Reload(op=0, tensor="w", link="nvme->gpu", size_bytes=7),
    wait(0, "w"),
    *runs(0, 1),
    out(1, "w"),
    wait(1, "w"),
    drop(1, "w"),
    *runs(1, 2),
    back(2, "w"),
    wait(2, "w"),
    *runs(2, 3),
    drop(3, "w"),
]
"""A weight of a drive that waits in the memory in between from one use to the next."""


def on_drive(steps: list[Step]) -> Plan:
    ops: Ops = [(("w",), ("x",)), (("x",), ("y",)), (("y", "w"), ("out",))]
    return dataclasses.replace(plan_of(ops, steps, homes={"w": "nvme"}), machine=WITH_DRIVE)


def test_the_middle_of_two_hops_is_a_place_of_its_own() -> None:
    # There it takes 7 bytes besides those that the drive keeps, until it is back with y and the output.
    assert heap(on_drive(TWO_HOPS)) == {"gpu": 28, "cpu": 7, "nvme": 7}
    with pytest.raises(PlanVerificationError, match="from 'cpu', which has no good copy"):
        heap(on_drive([*TWO_HOPS[:3], *TWO_HOPS[5:]]))
