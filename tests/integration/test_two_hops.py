"""Compiled models whose weights wait half the way: as eager, in the budget, as planned, explained and kept."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import gascompile
from benchmarks.emulated import slower
from benchmarks.two_hops import Chain, Layers, direct, main
from gascompile.core.machine import IoSettings
from gascompile.core.plan import Plan
from gascompile.core.sizes import KIB
from gascompile.core.steps import Fetch
from gascompile.machines.resolve import resolve_machine
from gascompile.passes.explain.diff import diff
from gascompile.passes.explain.explain import TensorExplanation, explain
from gascompile.runtime.memory.pinned import pinned_bytes
from gascompile.runtime.transfer.engine import read_blocks

CHAIN = Chain(name="toy", width=256, layers=8, rows=8, turns=3, gpu_layers=1.2, cpu_layers=4.2)


class Compiled:
    """A model, what it returns, and its plans for a machine with a way in two hops and without."""

    def __init__(self, folder: Path, cache: Path) -> None:
        torch.manual_seed(0)
        self.model, self.x = Layers(CHAIN).eval(), torch.randn(CHAIN.rows, CHAIN.width)
        self.path, self.cache = folder / "chain.safetensors", cache
        save_file({k: v.clone() for k, v in self.model.state_dict().items()}, self.path)
        with torch.no_grad():
            self.expected = self.model(self.x)
        own = resolve_machine("emulated", cache_dir=cache, read=read_blocks)
        # So slow that what ops take hardly matters.
        self.machine = replace(
            slower(own, 20.0), io=IoSettings(num_threads=2, chunk_bytes=64 * KIB)
        )

    def compile(self, *, has_hops: bool = True) -> gascompile.CompiledModel:
        on = self.machine if has_hops else direct(self.machine)
        with torch.device("meta"):
            skeleton = Layers(CHAIN)
        return gascompile.compile(
            skeleton,
            CHAIN.budget(on),
            example_inputs=(self.x,),
            checkpoint=self.path,
            machine=on,
            cache_dir=self.cache,
            fuse="off",
        )


@pytest.fixture
def made(tmp_path: Path, cache: Path) -> Compiled:
    return Compiled(tmp_path, cache)


def fetches(plan: Plan) -> int:
    return sum(isinstance(step, Fetch) for step in plan.steps)


def run_often(compiled: gascompile.CompiledModel, x: torch.Tensor) -> None:
    for _ in range(3):
        compiled(x)


def moved(link_bytes: Any) -> dict[str, int]:
    return {link: count for link, count in link_bytes.items() if count}


def test_a_drive_is_read_once_for_three_uses(made: Compiled, tmp_path: Path) -> None:
    budget = CHAIN.budget(made.machine)
    with made.compile(has_hops=False) as plain:
        assert torch.equal(plain(made.x), made.expected)
        before = plain.plan
    with made.compile() as compiled:
        plan = compiled.plan
        for _ in range(3):
            assert torch.equal(compiled(made.x), made.expected)
        report = compiled.last_run
        assert report is not None
        assert moved(report.link_bytes) == moved(plan.link_bytes)
        assert report.peak_bytes["cpu"] == pinned_bytes(plan)
        assert all(
            report.peak_bytes[tier] <= limit
            for tier, limit in budget.limits_bytes(made.machine).items()
            if tier in report.peak_bytes
        )
        assert report.paths["nvme->cpu"]
        code = compiled.graph_module.code
        compiled.save(tmp_path / "bundle")
    assert not fetches(before)
    assert fetches(plan)
    assert plan.certificate.predicted_s < 0.8 * before.certificate.predicted_s
    assert plan.link_bytes["nvme->cpu"] < 0.7 * before.link_bytes["nvme->gpu"]
    assert "fetch(mover, 'layers." in code
    assert "evict(mover, 'layers." in code
    with gascompile.load(tmp_path / "bundle") as loaded:
        assert fetches(loaded.plan) == fetches(plan)
        assert torch.equal(loaded(made.x), made.expected)
    check_explained(plan, before)


def check_explained(plan: Plan, before: Plan) -> None:
    """Check what is said of a plan in two hops beside one without."""
    fetched = next(step for step in plan.steps if isinstance(step, Fetch))
    said = explain(plan, fetched.tensor)
    assert isinstance(said, TensorExplanation)
    assert "from nvme by way of cpu, where it waits" in said.reason
    assert {transfer.link for transfer in said.transfers} == {"nvme->cpu", "cpu->gpu"}
    found = diff(before, plan)
    assert found.change_s < 0
    assert any("nvme->cpu" in change.after for change in found.moves)


def test_a_read_that_fails_half_the_way_is_the_ops_own(
    made: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    with made.compile() as compiled:
        assert fetches(compiled.plan)
        assert torch.equal(compiled(made.x), made.expected)
        real, calls = os.preadv, 0

        def failing(descriptor: int, buffers: Any, offset: int) -> int:
            nonlocal calls
            calls += 1
            if calls == 3:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(descriptor, buffers, offset)

        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", failing)
            with pytest.raises(gascompile.StorageError, match=r"layers\..*Input/output error"):
                run_often(compiled, made.x)
        for _ in range(2):
            assert torch.equal(compiled(made.x), made.expected)


def test_a_toy_run_of_the_benchmark_writes_what_it_finds(tmp_path: Path) -> None:
    output = tmp_path / "two_hops.json"
    result = main(["--toy", "--runs", "2", "-o", str(output)])
    assert json.loads(output.read_text()) == result
    for row in result["chains"]:
        for found in row["ways"].values():
            assert found["bytes_hold"]
            assert found["peak_holds"]
        assert row["ways"]["direct"]["fetches"] == 0
