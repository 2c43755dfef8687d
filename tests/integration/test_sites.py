"""Ops on both processors at once: results as eager, placement and times as predicted, budgets of both tiers kept."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gascompile
from benchmarks.both_processors import TOY, Case, grade
from gascompile.core.steps import Offload, Prefetch, Reload
from gascompile.core.waiting import own_threads
from gascompile.passes.graph.insert import insert
from gascompile.passes.search import sites as sites_pass
from gascompile.passes.search.site_routes import closed
from gascompile.runtime.devices.cuda import CudaDevice
from gascompile.runtime.devices.emulated import EmulatedDevice
from gascompile.runtime.devices.pacing import Disorder
from gascompile.runtime.memory.pinned import host_bytes
from gascompile.runtime.protocols import Device
from gascompile.runtime.run.executor import Executor
from gascompile.runtime.run.session import Session
from tests.integration.site_models import (
    ROWS,
    WIDTH,
    Block,
    Towers,
    compiled,
    eager,
    machine,
    sited,
)
from tests.runtime.devices.fake_cuda import fake_cuda


def test_halves_run_at_once_in_half_the_time_and_at_the_bound(towers: Towers, cache: Path) -> None:
    # Half of the weights fits the accelerator; the link brings one in a quarter of the time of an op.
    where, budget = machine(rate=5e8), 1 << 17
    with (
        compiled(towers, cache, budget, where, "one") as one,
        compiled(towers, cache, budget, where) as both,
    ):
        layer_s = 2 * ROWS * WIDTH * WIDTH / 1e9
        halves = sited(both.plan)
        assert {name.split(".")[0] for name in halves["gpu"]} == {"left"} or {
            name.split(".")[0] for name in halves["gpu"]
        } == {"right"}
        assert len(halves["cpu"]) == len(halves["gpu"]) == 6
        assert not any(
            isinstance(s, Prefetch) and s.tensor in halves["cpu"] for s in both.plan.steps
        )
        # Six layers one after the other on either processor, whatever moves; three on each at once.
        certificate = both.plan.certificate
        better_s = min(one.plan.certificate.predicted_s, 6 * layer_s)
        assert better_s >= 6 * layer_s
        assert better_s / certificate.predicted_s >= 1.6
        assert certificate.predicted_s == pytest.approx(3 * layer_s, rel=0.08)
        assert certificate.lower_bound_s <= certificate.predicted_s
        assert certificate.gap <= 0.08
        for _ in range(3):
            x = torch.randn(ROWS, WIDTH)
            for found, wanted in zip(both(x), eager(towers, x), strict=True):
                assert torch.equal(found, wanted)
            report = both.last_run
            assert report is not None
            assert set(report.site_s) == {"gpu", "cpu"}
            assert all(seconds > 0 for seconds in report.site_s.values())
            assert report.peak_bytes["gpu"] <= budget
            assert (
                report.peak_bytes["cpu"] <= host_bytes(both.plan) <= both.plan.budget_bytes["cpu"]
            )
        assert report is not None
        moved = {link: count for link, count in report.link_bytes.items() if count}
        assert moved == {link: count for link, count in both.plan.link_bytes.items() if count}


@pytest.mark.parametrize("compiled_so", [True, False])
@pytest.mark.parametrize("called_so", [True, False])
def test_inference_mode_makes_no_difference(
    compiled_so: bool, called_so: bool, towers: Towers, cache: Path
) -> None:
    x = torch.randn(ROWS, WIDTH)
    wanted = eager(towers, x)
    with torch.inference_mode(compiled_so):
        both = compiled(towers, cache, 1 << 17, machine())
    with both:
        for _ in range(2):
            with torch.inference_mode(called_so):
                found = both(x)
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_of_a_model_of_many_shapes_all_ops_stay(towers: Towers, cache: Path) -> None:
    with gascompile.compile(
        towers,
        gascompile.Budget(gpu=1 << 17, cpu="96MiB"),
        example_inputs=(torch.zeros(ROWS, WIDTH),),
        dynamic_shapes=({0: torch.export.Dim("rows", min=2, max=ROWS)},),
        machine=machine(),
        cache_dir=cache,
        sites="all",
    ) as one:
        assert {op.site for op in one.plan.ops} == {"gpu"}


def test_what_must_stay_stays_on_the_accelerator(cache: Path) -> None:
    torch.manual_seed(2)
    model = Block().eval()
    with compiled(model, cache, 1 << 19, machine(cpu_flops=1e12)) as both:
        sites = {op.name: op.site for op in both.plan.ops}
        assert "cpu" in sites.values()
        bound = ("bernoulli", "zeros_like", "chunk", "getitem", "add__", "add_ ")
        assert all(sites[name] == "gpu" for name in sites if name.startswith(bound))
        for spec in both.plan.workload.ops:
            if any("calls" in name for name in (*spec.reads, *spec.writes)):
                assert sites[spec.name] == "gpu"
        for seed in range(3):
            x = torch.randn(ROWS, WIDTH)
            twin = Block().eval()
            twin.load_state_dict(model.state_dict())
            twin.calls.copy_(both.states["calls"])
            torch.manual_seed(seed)
            wanted = eager(twin, x)
            torch.manual_seed(seed)
            assert torch.equal(both(x), wanted)
            assert torch.equal(both.states["calls"], twin.calls)


# ---------------------------------------------------------------- any choice of sites


class Maze(nn.Module):
    """Branches, views, joins and results that are read again much later, by chance."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.draws = random.Random(seed)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.paths = [
            (self.draws.randrange(k + 1), self.draws.randrange(k + 1), self.draws.randrange(4))
            for k in range(6)
        ]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = [x]
        for layer, (i, j, kind) in zip(self.layers, self.paths, strict=True):
            y = layer(values[i])
            if kind == 0:
                y = torch.relu(y) + values[j]
            elif kind == 1:
                y = y.view(WIDTH, ROWS).transpose(0, 1).reshape(ROWS, WIDTH)[:, :].sigmoid()
            elif kind == 2:
                y = (values[j].t() @ y)[:ROWS] * 0.01
            values.append(y)
        return values[-1] + values[3], values[2].t(), values[5]


@pytest.fixture
def any_sites(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let plans send weights that are drawn, in place of those that make them fast."""

    def draw(seed: int) -> None:
        draws = random.Random(seed)

        def sent(task: Any, tier: str) -> Iterator[frozenset[int]]:
            able = closed(task, frozenset(range(len(task.weights))), tier)
            some = frozenset(i for i in sorted(able) if draws.random() < 0.5)
            yield closed(task, some or able, tier)

        monkeypatch.setattr(sites_pass, "candidates", sent)
        monkeypatch.setattr(sites_pass, "improved", lambda _task, _tier, kept, *_: kept)

    return draw


@pytest.mark.parametrize("seed", range(6))
def test_any_choice_of_sites_gives_eagers_results(
    seed: int, cache: Path, any_sites: Callable[[int], None]
) -> None:
    any_sites(seed)
    torch.manual_seed(seed)
    model = Maze(seed).eval()
    where = machine(cpu_flops=1e13, rate=1e9)
    with compiled(model, cache, 1 << 17, where) as both:
        plan = both.plan
        assert {op.site for op in plan.ops} == {"gpu", "cpu"}
        assert any(isinstance(step, (Offload, Reload)) for step in plan.steps)
        program, sources = both.program, both.weights
        module = insert(program, plan)

        def check(device: Device, *, overlap: bool = True) -> None:
            with Session.for_plan(
                plan, sources=sources.sources, stamps=sources.stamps, states={}, device=device
            ) as session:
                executor = Executor(session, module, plan, overlap=overlap, paranoid=overlap)
                for _ in range(3):
                    x = torch.randn(ROWS, WIDTH)
                    for found, wanted in zip(executor.run(x), eager(model, x), strict=True):
                        assert torch.equal(found, wanted)

        # Copies that come as late as they may, in any order, show a wait that is missing.
        check(EmulatedDevice(where, disorder=Disorder(seed=seed, longest_delay_s=2e-3), late=True))
        check(EmulatedDevice(where), overlap=False)
        check(CudaDevice(api=fake_cuda()[0]))
    assert not own_threads("gascompile-site")


@pytest.mark.parametrize("case", TOY, ids=lambda case: case.model)
def test_the_benchmark_of_both_processors_runs_at_toy_size(case: Case, cache: Path) -> None:
    found = grade(case, cache, 3, 2.0)
    assert set(found["of"]) == {"accelerator", "processor", "both"}
    for row in found["of"].values():
        assert row["close"] and row["peak_holds"]
        assert row["exact"] or case.sites == "parts"
        assert len(row["times_s"]) == 3
