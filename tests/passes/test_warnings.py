"""What a plan warns of stands there once."""

from __future__ import annotations

import importlib.util

import pytest

from gascompile.api.plan import plan
from gascompile.core.budget import Budget
from gascompile.core.machine import Link, Machine, Place
from gascompile.core.sizes import MIB
from gascompile.core.workload import OpSpec, TensorKind, TensorSpec, Workload


def test_forms_that_lack_the_solver_say_so_together(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"w{i}" for i in range(4)]
    workload = Workload(
        name="hand",
        repeats=True,
        tensors=tuple(
            TensorSpec(name=name, size_bytes=20 * MIB, kind=TensorKind.WEIGHT) for name in names
        ),
        ops=tuple(
            OpSpec(name=f"op-{name}", time_s={"cpu": 1.0}, reads=(name,), splits={name: 64})
            for name in names
        ),
    )
    machine = Machine(
        name="hand",
        places=(Place.named("cpu", 100 * MIB), Place.named("nvme", 100 * MIB)),
        links=(Link(source_tier="nvme", target_tier="cpu", bandwidth_bytes_per_s=10 * MIB),),
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = plan(workload, Budget(cpu=50 * MIB), machine, time_limit_s=60)
    assert not any("larger" in warning for warning in found.warnings)
    small = machine.with_place(Place.named("cpu", 60 * MIB))
    more = plan(workload, Budget(cpu=500 * MIB), small, time_limit_s=60)
    assert any(
        "of 'cpu', of which machine 'hand' has 60.00 MiB" in warning for warning in more.warnings
    )
    assert any("HiGHS" in warning for warning in found.warnings)
    assert len(set(found.warnings)) == len(found.warnings)
