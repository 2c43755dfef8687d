"""Fused ops in whole compiles: eager's results within rounding, the promised memory, and code only from here."""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import gascompile
from gascompile.codegen import store as kernel_store
from gascompile.core.machine import Machine
from gascompile.cost_models.simulate.replay import replay_plan
from tests import zoo
from tests.integration.fused_models import ALWAYS, Corners, Gated, assert_close
from tests.integration.test_models import flat_run_bytes
from tests.zoo import eager


@pytest.mark.parametrize("name", ["llama", "mamba2"])
def test_results_and_memory_of_fused_models(name: str, kernels: Path) -> None:
    model, inputs = zoo.make(name)
    expected = eager(model, inputs)
    full = gascompile.plan(model, example_inputs=inputs, cache_dir=kernels).peak_bytes["cpu"]
    with pytest.raises(gascompile.InfeasiblePlanError) as error:
        gascompile.compile(model, 0, example_inputs=inputs, cache_dir=kernels)
    for budget in (full, max(error.value.required_bytes, full // 2)):
        with gascompile.compile(
            model, budget, example_inputs=inputs, cache_dir=kernels, **ALWAYS
        ) as compiled:
            assert compiled.fused is not None
            assert compiled.fused.num_ops > compiled.fused.num_segments > 0
            for _ in range(2):
                assert_close(compiled(**inputs), expected)
            report, plan = compiled.last_run, compiled.plan
            assert report is not None
            assert report.peak_bytes["cpu"] <= plan.peak_bytes["cpu"] <= budget
            outside = plan.peak_bytes["cpu"] - plan.arena_bytes["cpu"]
            outside -= sum(tensor.nbytes for tensor in compiled.states.values())
            assert flat_run_bytes(compiled, inputs) <= outside


def test_equal_layers_share_a_kernel_and_reduced_types_stay_within_rounding(
    gated: Gated, rows: dict[str, torch.Tensor], kernels: Path
) -> None:
    halved = gated.to(torch.bfloat16)
    x = rows["x"].to(torch.bfloat16)
    with gascompile.compile(halved, None, (x,), cache_dir=kernels, **ALWAYS) as compiled:
        assert compiled.fused is not None
        assert compiled.fused.num_kernels < compiled.fused.num_segments
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), halved(x), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("machine", [None, "emulated"])
def test_packed_weights_are_decoded_outside_of_kernels(
    machine: str | None, gated: Gated, rows: dict[str, torch.Tensor], kernels: Path
) -> None:
    def compiled(**options: Any) -> gascompile.CompiledModel:
        return gascompile.compile(
            gated, None, rows, machine=machine, weights="int8", cache_dir=kernels, **options
        )

    with compiled(fuse="off") as plain:
        wanted = plain(**rows)
    assert not torch.allclose(wanted, eager(gated, rows)[0], rtol=1e-5, atol=1e-5)
    with compiled(**ALWAYS) as fused:
        assert fused.fused is not None
        assert fused.fused.num_ops > fused.fused.num_segments > 0
        for _ in range(2):
            assert_close(fused(**rows), [wanted])


def test_corners_of_eager_stay(kernels: Path) -> None:
    rng = torch.Generator().manual_seed(7)
    x = torch.randn(5, 16, generator=rng)
    x[0, :4] = torch.tensor([float("nan"), float("inf"), -0.0, 0.0])
    n = torch.randint(-9, 9, (5, 16), generator=rng)
    model, twin = Corners().train(), Corners().train()
    with gascompile.compile(model, None, (x, n), cache_dir=kernels, **ALWAYS) as compiled:
        assert compiled.fused is not None
        assert compiled.fused.num_ops > 40
        for _ in range(2):
            found = compiled(x, n)
            for value, wanted in zip(found, twin(x, n), strict=True):
                assert value.stride() == wanted.stride()
                torch.testing.assert_close(value, wanted, equal_nan=True)
        assert found[-2] is x
        assert torch.equal(compiled.states["count"], twin.count)


def test_off_and_too_few_runs_are_bit_identical_to_eager(
    gated: Gated, rows: dict[str, torch.Tensor], cache: Path
) -> None:
    (wanted,) = eager(gated, rows)
    with gascompile.compile(gated, None, rows, cache_dir=cache, fuse="off") as compiled:
        assert compiled.fused is None
        assert torch.equal(compiled(**rows), wanted)
    with gascompile.compile(gated, None, rows, cache_dir=cache, fuse_runs=1) as compiled:
        assert compiled.fused is not None
        assert compiled.fused.num_ops == 0
        assert "raise fuse_runs" in compiled.fused.reason
        assert torch.equal(compiled(**rows), wanted)
    assert not kernel_store.folder_of(cache).exists()


@pytest.mark.parametrize(("share", "gains"), [(1.02, True), (3.0, False)])
def test_what_decides_by_little_may_not_decide_on_the_day(
    gated: Gated, tmp_path: Path, share: float, *, gains: bool
) -> None:
    rows = {"x": torch.randn(2048, 128)}
    told: dict[str, Any] = {"example_inputs": rows, "cache_dir": tmp_path}
    full = gascompile.plan(gated, machine="cpu-nvme", **told)
    ops_s, budget = sum(op.time_s for op in full.ops), full.peak_bytes["cpu"] - 200_000
    rate = 1e5 / ops_s
    for _ in range(3):  # what moves depends on how fast it does
        slow = _with_rate(full.machine, rate)
        plan = gascompile.plan(gated, budget, machine=slow, **told)
        moved_bytes = replay_plan(plan).link_bytes["nvme->cpu"]
        rate = moved_bytes / (ops_s * share)
    slow = _with_rate(full.machine, rate)
    with gascompile.compile(gated, budget, machine=slow, fuse_runs=0, **told) as compiled:
        timeline = replay_plan(compiled.plan)
        assert timeline.link_busy_s["nvme->cpu"] == pytest.approx(share * ops_s)
        assert timeline.seconds > ops_s
        assert compiled.fused is not None
        assert ("would save 0 us" not in compiled.fused.reason) == gains


def _with_rate(machine: Machine, rate: float) -> Machine:
    links = tuple(
        replace(link, bandwidth_bytes_per_s=rate, latency_s=0.0, shared=())
        for link in machine.links
    )
    return replace(machine, links=links, pipes=())


def test_kernels_that_are_there_are_used_by_other_plans(
    gated: Gated, rows: dict[str, torch.Tensor], cache: Path
) -> None:
    gascompile.compile(gated, None, rows, cache_dir=cache, **ALWAYS).close()
    with gascompile.compile(gated, "64MiB", rows, cache_dir=cache, fuse_runs=0) as compiled:
        assert compiled.fused is not None
        assert compiled.fused.num_ops > 0
        assert compiled.fused.compile_s == 0
        assert_close(compiled(**rows), eager(gated, rows))


def test_inputs_that_lie_otherwise_in_memory(gated: Gated, kernels: Path) -> None:
    x = torch.randn(3, 128)
    other = torch.randn(128, 3).t()
    with gascompile.compile(gated, None, (x,), cache_dir=kernels, **ALWAYS) as compiled:
        assert compiled.fused is not None
        assert compiled.fused.num_ops > 0
        assert_close(compiled(other), eager(gated, {"x": other}))


def test_without_a_compiler_ops_run_one_by_one(
    gated: Gated,
    rows: dict[str, torch.Tensor],
    cache: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++")
    for _ in range(2):
        with (
            caplog.at_level(logging.WARNING, logger="gascompile"),
            gascompile.compile(gated, None, rows, cache_dir=cache, **ALWAYS) as compiled,
        ):
            assert compiled.fused is not None
            assert compiled.fused.num_ops == 0
            assert "no C++ compiler '/nowhere/g++'" in compiled.fused.reason
            assert torch.equal(compiled(**rows), eager(gated, rows)[0])
    # The plan is kept, with its reason; it is made again where there is a compiler.
    assert len([r for r in caplog.records if "not fused" in r.getMessage()]) == 1
    monkeypatch.delenv("CXX")
    with gascompile.compile(gated, None, rows, cache_dir=cache, **ALWAYS) as compiled:
        assert compiled.fused is not None
        assert compiled.fused.num_ops > 0
        assert_close(compiled(**rows), eager(gated, rows))


def test_a_compiler_that_fails_leaves_ops_one_by_one(
    gated: Gated, rows: dict[str, torch.Tensor], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "false")
    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", lambda: "false")
    with gascompile.compile(gated, None, rows, cache_dir=cache, **ALWAYS) as compiled:
        assert compiled.fused is not None
        assert compiled.fused.reason.startswith("'false' failed")
        assert torch.equal(compiled(**rows), eager(gated, rows)[0])


def test_dynamic_shapes_stay_unfused(
    gated: Gated, rows: dict[str, torch.Tensor], cache: Path
) -> None:
    batch = torch.export.Dim("batch", min=2, max=8)
    with gascompile.compile(
        gated, None, rows, dynamic_shapes={"x": {0: batch}}, cache_dir=cache, **ALWAYS
    ) as compiled:
        assert compiled.fused is not None
        assert compiled.fused.num_ops == 0
        assert torch.equal(compiled(**rows), eager(gated, rows)[0])


def test_damaged_kernels_of_the_store_are_compiled_again(
    gated: Gated, rows: dict[str, torch.Tensor], cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gascompile.compile(gated, None, rows, cache_dir=cache, **ALWAYS).close()
    (file,) = kernel_store.folder_of(cache).glob("*.so")
    file.write_bytes(file.read_bytes()[:100])
    with gascompile.compile(gated, "64MiB", rows, cache_dir=cache, **ALWAYS) as compiled:
        assert_close(compiled(**rows), eager(gated, rows))
        assert compiled.fused is not None
        assert compiled.fused.num_ops > 0
    assert "are damaged; compiling again" in caplog.text


@pytest.mark.parametrize("change", ["another processor", "kernels gone"])
def test_kept_plans_whose_kernels_cannot_be_used_are_fused_again(
    change: str,
    gated: Gated,
    rows: dict[str, torch.Tensor],
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gascompile.compile(gated, None, rows, cache_dir=cache, **ALWAYS).close()
    if change == "kernels gone":
        shutil.rmtree(kernel_store.folder_of(cache))
    else:
        monkeypatch.setattr("gascompile.codegen.build.processor_features", lambda: "newer")
    for is_first in (True, False):
        with gascompile.compile(gated, None, rows, cache_dir=cache, **ALWAYS) as compiled:
            assert_close(compiled(**rows), eager(gated, rows))
            assert compiled.fused is not None
            assert compiled.fused.num_ops > 0
            assert (compiled.fused.compile_s > 0) == is_first
