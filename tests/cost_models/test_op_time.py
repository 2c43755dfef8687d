"""The roofline by hand, on a machine whose rates are round numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gascompile.core.errors import UnsupportedOpError
from gascompile.core.machine import ComputeRate, Machine, MemoryRate, Place, RatePoint
from gascompile.cost_models.formulas.op_time import op_time_s, rate_at

MACHINE = Machine(
    name="round",
    places=(Place.named("cpu", 1 << 30),),
    links=(),
    rates=(
        ComputeRate(device="cpu", dtype="float32", flops_per_s=100e9),
        ComputeRate(device="cpu", dtype="bfloat16", flops_per_s=400e9),
    ),
    memory=(MemoryRate(device="cpu", bandwidth_bytes_per_s=10e9, op_overhead_s=2e-6),),
)


def seconds(flops: int, moved_bytes: int, dtype: str = "float32", device: str = "cpu") -> float:
    return op_time_s(
        flops=flops,
        read_bytes=moved_bytes,
        write_bytes=0,
        dtype=dtype,
        device=device,
        machine=MACHINE,
    )


def test_compute_bound() -> None:
    # 1e9 FLOPs at 100e9 per second are 10 ms; 1e6 bytes at 10e9 per second are 0.1 ms.
    assert seconds(10**9, 10**6) == pytest.approx(10e-3 + 2e-6)


def test_memory_bound() -> None:
    # A one-row product with 1000 x 1000 float32 weights: 2e6 FLOPs are 20 us, 4e6 bytes are 400 us.
    assert seconds(2 * 10**6, 4 * 10**6) == pytest.approx(400e-6 + 2e-6)


def test_reads_and_writes_add_up() -> None:
    time_s = op_time_s(
        flops=0,
        read_bytes=3 * 10**6,
        write_bytes=10**6,
        dtype="float32",
        device="cpu",
        machine=MACHINE,
    )
    assert time_s == pytest.approx(400e-6 + 2e-6)


def test_each_dtype_has_its_own_rate() -> None:
    assert seconds(10**9, 0, "bfloat16") == pytest.approx(2.5e-3 + 2e-6)


def test_an_op_that_does_nothing_costs_its_launch() -> None:
    assert seconds(0, 0) == pytest.approx(2e-6)


@pytest.mark.parametrize("dtype", ["int64", "int8", "uint8", "bool"])
def test_integers_are_memory_bound(dtype: str) -> None:
    assert seconds(10**12, 10**7, dtype) == pytest.approx(1e-3 + 2e-6)


def test_complex_uses_the_rate_of_its_parts() -> None:
    assert seconds(10**9, 0, "complex64") == seconds(10**9, 0, "float32")


def test_an_unknown_dtype_names_the_missing_rate() -> None:
    with pytest.raises(
        UnsupportedOpError, match=r"no compute rate for float16 .*bfloat16, float32"
    ):
        seconds(10**9, 0, "float16")


def test_a_dtype_without_rate_is_fine_when_nothing_is_computed() -> None:
    assert seconds(0, 10**7, "float8_e4m3fn") == pytest.approx(1e-3 + 2e-6)


def test_an_unknown_device_names_the_missing_rate() -> None:
    with pytest.raises(
        UnsupportedOpError, match=r"no memory rate for device 'gpu' \(it has: cpu\)"
    ):
        seconds(1, 1, device="gpu")


CLASSES = replace(
    MACHINE,
    rates=(
        ComputeRate(
            device="cpu",
            dtype="float32",
            flops_per_s=100e9,
            points=(
                RatePoint(flops_per_byte=10, flops_per_s=50e9),
                RatePoint(flops_per_byte=0.5, flops_per_s=10e9),
                RatePoint(flops_per_byte=40, flops_per_s=100e9),
            ),
        ),
    ),
)


@pytest.mark.parametrize(
    ("flops_per_byte", "ns_per_byte"),
    [
        (0.5, 0.05),  # 0.5 / 10e9
        (0.25, 0.05),  # fewer FLOPs, the same bytes
        (10, 0.2),  # 10 / 50e9
        (40, 0.4),  # 40 / 100e9
        (25, 0.3),  # half way between
        (80, 0.8),  # at the last rate
    ],
)
def test_a_rate_with_points_is_a_roofline(flops_per_byte: float, ns_per_byte: float) -> None:
    time_s = op_time_s(
        flops=round(flops_per_byte * 10**8),
        read_bytes=10**8,
        write_bytes=0,
        dtype="float32",
        device="cpu",
        machine=CLASSES,
    )
    assert time_s == pytest.approx(ns_per_byte * 1e-9 * 10**8 + 2e-6)


def test_an_op_that_computes_nothing_ignores_the_points() -> None:
    time_s = op_time_s(
        flops=0,
        read_bytes=10**7,
        write_bytes=0,
        dtype="float32",
        device="cpu",
        machine=CLASSES,
    )
    assert time_s == pytest.approx(1e-3 + 2e-6)


@given(low=st.floats(0.01, 1e4), factor=st.floats(1.0, 100.0))
def test_more_work_on_the_same_bytes_never_takes_less(low: float, factor: float) -> None:
    def time_s(flops_per_byte: float) -> float:
        rate = CLASSES.rates[0]
        return flops_per_byte / rate_at(rate, flops_per_byte)

    assert time_s(low * factor) >= time_s(low) * (1 - 1e-12)
