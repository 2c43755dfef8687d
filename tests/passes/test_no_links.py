"""A machine whose memory no link leads into: everything stays, or the budget is refused."""

from __future__ import annotations

import pytest

from gascompile.api.plan import plan
from gascompile.core.budget import Budget
from gascompile.core.errors import InfeasiblePlanError
from gascompile.core.machine import Machine, Place
from gascompile.core.sizes import PAGE_BYTES
from gascompile.core.workload import OpSpec, TensorKind, TensorSpec, Workload

MACHINE = Machine(name="hand", places=(Place.named("cpu", 1 << 30),), links=())
WORKLOAD = Workload(
    name="hand",
    repeats=True,
    tensors=(
        TensorSpec(name="w", size_bytes=PAGE_BYTES, kind=TensorKind.WEIGHT),
        TensorSpec(name="v", size_bytes=PAGE_BYTES, kind=TensorKind.WEIGHT),
    ),
    ops=(
        OpSpec(name="first", time_s={"cpu": 1.0}, reads=("w",)),
        OpSpec(name="bare", time_s={"cpu": 3.0}),
        OpSpec(name="last", time_s={"cpu": 1.0}, reads=("v",)),
    ),
)


def test_everything_stays_or_the_budget_is_refused() -> None:
    with pytest.raises(InfeasiblePlanError) as refused:
        plan(WORKLOAD, Budget(cpu=PAGE_BYTES), MACHINE, time_limit_s=60)
    found = plan(WORKLOAD, Budget(cpu=refused.value.required_bytes), MACHINE, time_limit_s=60)
    assert found.certificate.predicted_s == pytest.approx(5.0)
    assert found.certificate.status == "optimal"
