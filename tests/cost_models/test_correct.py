"""Corrections by whole runs: hand arithmetic, and a planted truth that a fit has to find."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gascompile.core.machine import ComputeRate, Link, Machine, MemoryRate, Place, RatePoint
from gascompile.cost_models.measure.correct import (
    Factor,
    compute_factor,
    fitted,
    overhead_per_op_s,
    with_compute_factors,
    with_link,
    with_overhead,
)

MACHINE = Machine(
    name="round",
    places=(Place.named("cpu", 1 << 30), Place.named("nvme", 1 << 40)),
    links=(
        Link(
            source_tier="nvme",
            target_tier="cpu",
            bandwidth_bytes_per_s=2e9,
            latency_s=1e-4,
            source="measured today: reads",
        ),
        Link(source_tier="cpu", target_tier="nvme", bandwidth_bytes_per_s=1e9),
    ),
    rates=(
        ComputeRate(
            device="cpu",
            dtype="float32",
            flops_per_s=100e9,
            points=(
                RatePoint(flops_per_byte=0.5, flops_per_s=10e9),
                RatePoint(flops_per_byte=2, flops_per_s=40e9),
                RatePoint(flops_per_byte=50, flops_per_s=100e9),
            ),
        ),
        ComputeRate(device="cpu", dtype="float64", flops_per_s=50e9),
    ),
    memory=(
        MemoryRate(
            device="cpu", bandwidth_bytes_per_s=10e9, op_overhead_s=1e-6, source="measured today: x"
        ),
    ),
)


def test_overhead_is_what_is_left() -> None:
    # 100 ops of 20 us of work took 500 us in a run: 480 us of fixed costs.
    assert overhead_per_op_s(measured_s=500e-6, work_s=20e-6, num_ops=100) == pytest.approx(4.8e-6)


def test_overhead_is_never_negative() -> None:
    assert overhead_per_op_s(measured_s=1e-6, work_s=5e-6, num_ops=3) == 0.0


def test_a_factor_leaves_fixed_costs_alone() -> None:
    # 10 ms predicted and 13 ms measured, 1 ms of both fixed: 9 ms became 12 ms.
    factor = compute_factor(measured_s=13e-3, predicted_s=10e-3, fixed_s=1e-3)
    assert factor == pytest.approx(0.75)


@pytest.mark.parametrize("measured_s", [1.0, 1e-3, 1e-4])
def test_a_disturbed_run_corrects_nothing(measured_s: float) -> None:
    assert compute_factor(measured_s=measured_s, predicted_s=10e-3, fixed_s=1e-3) == 1.0


def test_each_point_takes_the_nearest_factor() -> None:
    factors = [Factor(flops_per_byte=0.5, factor=0.5), Factor(flops_per_byte=32, factor=0.8)]
    found = with_compute_factors(MACHINE, factors, "two runs")
    rate, plain = found.rates
    assert [point.flops_per_s for point in rate.points] == pytest.approx([5e9, 20e9, 80e9])
    assert rate.flops_per_s == pytest.approx(80e9)
    assert "0.50 to 0.80 by two runs" in rate.source
    assert plain.flops_per_s == 50e9
    assert replace(found, rates=MACHINE.rates) == MACHINE


def test_sources_name_what_was_measured_alone() -> None:
    machine = with_overhead(MACHINE, 5e-6, "a run")
    machine = with_link(
        machine, "nvme->cpu", bandwidth_bytes_per_s=1.5e9, latency_s=2e-5, how="a stream"
    )
    assert machine.memory[0].op_overhead_s == 5e-6
    assert machine.memory[0].source == (
        "measured today: x; op overhead of 5.00 us by a run, 1.00 us alone"
    )
    link = machine.link("nvme->cpu")
    assert (link.bandwidth_bytes_per_s, link.latency_s) == (1.5e9, 2e-5)
    assert link.source == (
        "measured today: reads; 1.50 GB/s by a stream, 2.00 GB/s alone; "
        "20 us per transfer by a stream, 100 us alone"
    )
    assert machine.link("cpu->nvme") == MACHINE.link("cpu->nvme")


@given(truth=st.floats(2e7, 5e10), compute_s=st.floats(0, 1.0))
def test_a_fit_finds_the_rate_that_made_the_run(truth: float, compute_s: float) -> None:
    def predict(rate: float) -> float:
        return max(compute_s, 1e9 / rate)

    found = fitted(predict, predict(truth), low=1e7, high=1e11)
    assert found is not None
    assert predict(found) == pytest.approx(predict(truth), rel=1e-6)


def test_a_run_that_no_rate_explains_says_nothing() -> None:
    assert fitted(lambda rate: 1 / rate, 1e3, low=0.1, high=10) is None
    assert fitted(lambda rate: 1 / rate, 1e-3, low=0.1, high=10) is None
