"""The limit of a workload holds for each of its forms, also where ops may run at several sites."""

from __future__ import annotations

import pytest

from gascompile.api.plan import plan
from gascompile.core.budget import Budget
from gascompile.core.machine import Link, Machine, Place
from gascompile.core.sizes import MIB
from gascompile.core.workload import OpSpec, TensorKind, TensorSpec, Workload
from gascompile.passes.bounds.least_time import least_time
from gascompile.passes.model.tiling import forms

MACHINE = Machine(
    name="hand",
    places=(Place.named("gpu", 100 * MIB), Place.named("cpu", 100 * MIB)),
    links=(
        Link(source_tier="cpu", target_tier="gpu", bandwidth_bytes_per_s=MIB),
        Link(source_tier="gpu", target_tier="cpu", bandwidth_bytes_per_s=MIB),
    ),
)


def linear(*, gathered_bytes: int | None) -> Workload:
    """Return an op that takes 2 s on the GPU and 3 s next to its weights, of 16 MiB and of 8 MiB, and a small one."""
    gathers = {} if gathered_bytes is None else {"table": gathered_bytes}
    return Workload(
        name="hand",
        repeats=True,
        tensors=(
            TensorSpec(name="x", size_bytes=8, kind=TensorKind.INPUT),
            TensorSpec(name="w", size_bytes=16 * MIB, kind=TensorKind.WEIGHT),
            TensorSpec(name="table", size_bytes=8 * MIB, kind=TensorKind.WEIGHT),
            TensorSpec(name="h", size_bytes=8, kind=TensorKind.ACTIVATION),
            TensorSpec(name="y", size_bytes=8, kind=TensorKind.OUTPUT),
        ),
        ops=(
            OpSpec(
                name="linear",
                time_s={"gpu": 2.0, "cpu": 3.0},
                reads=("x", "w", "table"),
                writes=("h",),
                splits={"w": 64} if gathered_bytes is None else {},
                gathers=gathers,
            ),
            OpSpec(name="end", time_s={"gpu": 0.5, "cpu": 0.5}, reads=("h",), writes=("y",)),
        ),
    )


@pytest.mark.parametrize("gathered_bytes", [None, 4096])
def test_no_form_has_a_higher_limit_than_the_whole(gathered_bytes: int | None) -> None:
    workload = linear(gathered_bytes=gathered_bytes)
    limits = {"gpu": MIB, "cpu": 100 * MIB}
    # All weights rest and the op runs next to them.
    whole_s, _ = least_time(workload, MACHINE, limits)
    assert whole_s <= 3.5
    found = list(forms(workload, MACHINE))
    assert len(found) > 1
    assert all(least_time(form, MACHINE, limits)[0] <= whole_s for form in found)


def test_tiles_run_next_to_their_weights() -> None:
    workload = linear(gathered_bytes=None)
    found = plan(workload, Budget(gpu=25 * MIB), MACHINE, time_limit_s=60)
    assert found.certificate.lower_bound_s <= found.certificate.predicted_s <= 3.6
    assert least_time(found.workload, MACHINE, found.budget_bytes)[0] <= 3.5
