"""Spoilt JSON of every format: what comes out is a verified plan or a typed error, and nothing else."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gascompile
from gascompile.errors import GASCompileError
from gascompile.ir import Plan
from gascompile.passes.explain import explain
from gascompile.passes.verify import verify
from tests.core.bad_files import BUDGET, MACHINE, WORKLOAD, data_of, write

_KINDS = ("workload", "machine", "plan")
_VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2, 2**63, 10**400, -(10**30), 0.5, -0.5, 1e308, 5e-324, float("nan"), float("inf"),
    "", "x", "w0", "gpu", "cpu", "nvme", "nvme->gpu", "\ud800", "\x1b[2J", "9" * 100, [], {}, [[]], {"a": 1},
]  # fmt: skip
_EXAMPLES = settings(
    max_examples=60,
    deadline=timedelta(seconds=20),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def places(data: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of everything inside ``data``."""
    items = (
        data.items()
        if isinstance(data, dict)
        else enumerate(data)
        if isinstance(data, list)
        else ()
    )
    for key, item in items:
        yield (*place, key)
        yield from places(item, (*place, key))


def at(data: Any, place: tuple[Any, ...]) -> Any:
    """Return what stands at a path."""
    for key in place:
        data = data[key]
    return data


def spoil(draw: st.DrawFn, data: Any) -> None:
    """Drop, duplicate, replace, scale, copy from elsewhere or swap one thing in ``data``."""
    known = list(places(data))
    if not known:
        return
    place = draw(st.sampled_from(known))
    parent, key, value = at(data, place[:-1]), place[-1], at(data, place)
    kind = draw(st.sampled_from(("drop", "double", "replace", "scale", "copy", "swap")))
    if kind == "drop":
        del parent[key]
    elif kind == "double" and isinstance(parent, list):
        parent.insert(draw(st.integers(0, len(parent))), copy.deepcopy(value))
    elif kind == "scale" and isinstance(value, (int, float)):
        parent[key] = value * draw(st.sampled_from((-1, 2, 10**9, 0.5)))
    elif kind == "copy":
        parent[key] = copy.deepcopy(at(data, draw(st.sampled_from(known))))
    elif kind == "swap":
        other = draw(
            st.sampled_from(sorted(parent) if isinstance(parent, dict) else range(len(parent)))
        )
        parent[key], parent[other] = parent[other], value
    else:
        parent[key] = draw(st.sampled_from(_VALUES))


@st.composite
def spoilt(draw: st.DrawFn, kind: str) -> Any:
    """Return the data of a format with one to three things wrong."""
    data = data_of(kind)
    for _ in range(draw(st.integers(1, 3))):
        spoil(draw, data)
    return data


def use(kind: str, path: Path) -> Plan:
    """Do with a file what a user does with it."""
    if kind == "workload":
        return gascompile.plan(path, BUDGET, MACHINE, time_limit_s=1)
    if kind == "machine":
        return gascompile.plan(WORKLOAD, BUDGET, path, time_limit_s=1)
    plan = Plan.load(path)
    gascompile.simulate(plan)
    for name in (*list(plan.tensors)[:3], *(op.name for op in plan.ops[:1])):
        explain(plan, name)
    return plan


@pytest.mark.parametrize("kind", _KINDS)
def test_a_spoilt_file_is_refused_or_planned(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    use(kind, write(path, data_of(kind)))  # as it is, it can be used

    @_EXAMPLES
    @given(spoilt(kind))
    def check(data: Any) -> None:
        write(path, data)
        try:
            plan = use(kind, path)
        except GASCompileError:
            return
        verify(plan)
        assert all(peak <= plan.budget_bytes[tier] for tier, peak in plan.peak_bytes.items())

    check()


@_EXAMPLES
@given(text=st.binary(max_size=200))
def test_bytes_of_any_kind_are_refused(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(text)
    for source, machine in ((path, MACHINE), (WORKLOAD, path)):
        with pytest.raises(GASCompileError):
            gascompile.plan(source, BUDGET, machine)


@_EXAMPLES
@given(data=st.data())
def test_a_file_with_bytes_changed_is_refused_or_planned(
    tmp_path: Path, data: st.DataObject
) -> None:
    path = write(tmp_path / "x.json", data_of("workload"))
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw)
    with contextlib.suppress(GASCompileError):
        verify(use("workload", path))
