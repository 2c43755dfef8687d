"""Lifetimes that can be read off the ops."""

from __future__ import annotations

import pytest

from gascompile.core.workload import OpSpec, TensorKind, TensorSpec, Workload
from gascompile.passes.model.liveness import liveness


def spec(name: str, size_bytes: int, kind: TensorKind) -> TensorSpec:
    return TensorSpec(name=name, size_bytes=size_bytes, kind=kind)


TENSORS = (
    spec("w", 1000, TensorKind.WEIGHT),
    spec("v", 2000, TensorKind.WEIGHT),
    spec("idle", 3000, TensorKind.WEIGHT),
    spec("s", 7, TensorKind.STATE),
    spec("x", 50, TensorKind.INPUT),
    spec("a", 10, TensorKind.ACTIVATION),
    spec("b", 20, TensorKind.ACTIVATION),
    spec("y", 40, TensorKind.OUTPUT),
)


def workload(*ops: OpSpec) -> Workload:
    return Workload(name="toy", repeats=False, tensors=TENSORS, ops=ops)


def op(reads: str, writes: str, workspace_bytes: int = 0) -> OpSpec:
    return OpSpec(
        name=f"{reads}>{writes}",
        time_s={},
        reads=tuple(reads.split()),
        writes=tuple(writes.split()),
        workspace_bytes=workspace_bytes,
    )


def test_what_is_read_and_what_is_written_stand_side_by_side() -> None:
    live = liveness(workload(op("x w", "a"), op("a v w", "b"), op("b", "y"), op("s", "")))
    # a | a b | b y | y
    assert (live.peak_bytes, live.peak_op, live.state_bytes) == (60, 2, 7)
    assert live.weight_uses == {"w": (0, 1), "v": (1,), "idle": ()}


def test_an_output_lives_to_the_end_and_workspace_only_in_its_op() -> None:
    live = liveness(workload(op("x", "y"), op("x", "a", 5), op("a", "b")))
    # y | y a + 5 | y a b
    assert (live.peak_bytes, live.peak_op) == (70, 2)
    assert liveness(workload(op("x", "y"), op("x", "a", 500))).peak_bytes == 550


def test_a_write_that_nobody_reads_lives_in_its_op_alone() -> None:
    assert liveness(workload(op("x", "a"), op("x", "b"))).peak_bytes == 20


def test_an_unknown_tensor_is_named() -> None:
    with pytest.raises(ValueError, match="'lost'"):
        liveness(workload(op("lost", "a")))


def test_no_ops_need_nothing() -> None:
    assert liveness(workload()).peak_bytes == 0
