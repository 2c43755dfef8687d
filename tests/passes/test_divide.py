"""Tiles and gathers of a workload, with numbers that can be added in the head."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gascompile.core.machine import IoSettings, Machine, MemoryRate
from gascompile.core.sizes import PAGE_BYTES
from gascompile.core.workload import OpSpec, TensorKind, TensorSpec, Workload
from gascompile.cost_models.formulas.gathers import gather_link_bytes
from gascompile.passes.graph.divide import Division, divide
from gascompile.passes.model.liveness import liveness
from tests.passes.planning import cpu_machine, weight

OVERHEAD_S = 0.25
ROW_BYTES = 2 * PAGE_BYTES
MACHINE: Machine = replace(
    cpu_machine(bandwidth=ROW_BYTES, latency_s=0.5),
    memory=(MemoryRate(device="cpu", bandwidth_bytes_per_s=1.0, op_overhead_s=OVERHEAD_S),),
    io=IoSettings(num_threads=2),
)


def language_model(*, tied: bool = False) -> Workload:
    """Return an embedding of 3 tokens and an output layer of 10 rows that takes 10 s beside its launch."""
    head = "table" if tied else "head"
    weights = [weight("table", 10 * ROW_BYTES), weight("bias", 40)]
    if not tied:
        weights.append(weight("head", 10 * ROW_BYTES))
    return Workload(
        name="lm",
        repeats=True,
        tensors=(
            *weights,
            TensorSpec(name="%ids", size_bytes=24, kind=TensorKind.INPUT),
            TensorSpec(name="%embed", size_bytes=3 * ROW_BYTES, kind=TensorKind.ACTIVATION),
            TensorSpec(name="%linear", size_bytes=120, kind=TensorKind.OUTPUT),
        ),
        ops=(
            OpSpec(
                name="embed",
                time_s={"cpu": 1.0},
                reads=("table", "%ids"),
                writes=("%embed",),
                gathers={"table": 3 * ROW_BYTES},
            ),
            OpSpec(
                name="linear",
                time_s={"cpu": 10.0 + OVERHEAD_S},
                reads=("%embed", head, "bias"),
                writes=("%linear",),
                workspace_bytes=7,
                flops=1000,
                read_bytes=500,
                write_bytes=100,
                splits={head: 10},
            ),
        ),
    )


def test_a_division_of_nothing_changes_nothing() -> None:
    assert divide(language_model(), MACHINE, Division()) == language_model()


def test_tiles_share_the_work_and_each_pays_the_launch() -> None:
    found = divide(language_model(), MACHINE, Division(tile_rows={"head": 4}))
    tiles = {t.name: t.size_bytes for t in found.tensors if t.name.startswith("head")}
    assert tiles == {
        "head[0:4]": 4 * ROW_BYTES,
        "head[4:8]": 4 * ROW_BYTES,
        "head[8:10]": 2 * ROW_BYTES,
    }
    parts = found.ops[1:]
    assert [op.name for op in parts] == ["linear[0:4]", "linear[4:8]", "linear[8:10]"]
    assert [op.reads for op in parts] == [("%embed", tile, "bias") for tile in tiles]
    assert {op.writes for op in parts} == {("%linear",)}
    assert [op.time_s["cpu"] for op in parts] == pytest.approx([4.25, 4.25, 2.25])
    assert [op.flops for op in parts] == [400, 400, 200]
    assert [op.read_bytes for op in parts] == [200, 200, 100]
    assert [op.write_bytes for op in parts] == [40, 40, 20]
    assert found.ops[0] == language_model().ops[0]


def test_tiles_need_no_more_activations_than_the_whole() -> None:
    whole = liveness(language_model())
    tiled = liveness(divide(language_model(), MACHINE, Division(tile_rows={"head": 1})))
    assert tiled.peak_bytes == whole.peak_bytes == 3 * ROW_BYTES + 120 + 7
    assert tiled.weight_uses["bias"] == tuple(range(1, 11))


def test_a_gather_reads_its_rows_by_itself() -> None:
    found = divide(language_model(), MACHINE, Division(gathered=frozenset({"table"})))
    assert found.ops[0].reads == ("%ids",)
    # Three rows are six pages, read by two threads in three turns of half a second, at a row a second.
    assert found.ops[0].time_s["cpu"] == pytest.approx(1.0 + 3 * 0.5 + 3.0)
    assert liveness(found).weight_uses["table"] == ()
    assert gather_link_bytes(found.ops, MACHINE) == {"nvme->cpu": 3 * ROW_BYTES}
    assert gather_link_bytes(language_model().ops, MACHINE) == {}


def test_a_tied_weight_is_gathered_by_one_op_and_tiled_by_the_other() -> None:
    division = Division(tile_rows={"table": 5}, gathered=frozenset({"table"}))
    found = divide(language_model(tied=True), MACHINE, division)
    assert [op.reads for op in found.ops] == [
        ("%ids",),
        ("%embed", "table[0:5]", "bias"),
        ("%embed", "table[5:10]", "bias"),
    ]
    assert "table" not in {tensor.name for tensor in found.tensors}
    assert gather_link_bytes(found.ops, MACHINE) == {"nvme->cpu": 3 * ROW_BYTES}


def test_a_weight_that_an_op_needs_whole_stays_whole() -> None:
    tied = language_model(tied=True)
    assert divide(tied, MACHINE, Division(tile_rows={"table": 5})) == tied
    norm = OpSpec(name="norm", time_s={"cpu": 1.0}, reads=("head",))
    read_twice = replace(language_model(), ops=(*language_model().ops, norm))
    assert divide(read_twice, MACHINE, Division(tile_rows={"head": 5})) == read_twice
