"""``gascompile calibrate``: measures this machine thoroughly, then corrects it by runs of a small model.

The runs go the way of every compile, through capture, planner and runtime, so that what no measurement of
a single resource sees is in the numbers: calls from Python, waiting threads, reads beside products.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from gascompile.api.compile import compile as compile_model
from gascompile.api.compiled import CompiledModel
from gascompile.core.machine import Interference, InterferencePoint, Machine
from gascompile.core.plan import Plan
from gascompile.cost_models.measure import correct
from gascompile.cost_models.measure.disk import ProbeReader
from gascompile.cost_models.measure.machine import THOROUGH, MeasuringEffort, Stage, measure_machine
from gascompile.cost_models.simulate.replay import replay_plan
from gascompile.machines.busy import warned_if_busy
from gascompile.machines.gpu import with_gpu
from gascompile.machines.meetings import with_meetings
from gascompile.machines.resolve import made_folder, remember_machine
from gascompile.passes.graph.annotate import annotate
from gascompile.runtime.devices.probe import usable_gpu

_NUM_STAGES = 7  # calls of ``stage`` on a host
_NUM_GPU_STAGES = 2  # and those more with a GPU
_PREFIX = ".gascompile-calibration-"
_STALE_S = 3600.0  # a folder that old was left by a process that ended
_RUNS_LIMIT_S = 2.0
"""For the repetitions of one run; on an idle machine they take half of it."""
_STREAMED = "all_streamed"
_LINK = "nvme->cpu"
_BOUND = 0.05
"""So little longer than its ops alone a run is bound by them."""
_LEAST_SPEED = 0.05
"""Of a link beside ops that leave readers next to nothing."""
_LATENCY_RANGE_S = (1e-7, 5e-4)
"""Of an op, within which the one that explains a run is looked for."""


def num_stages() -> int:
    """Return how often ``stage`` is told of something on this machine."""
    return _NUM_STAGES + (_NUM_GPU_STAGES if usable_gpu() else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Size of the built-in model."""

    width: int
    inner: int
    num_blocks: int
    outputs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trials:
    """What to run."""

    tiny: Shape = Shape(width=64, inner=192, num_blocks=4, outputs=256)
    """So little work that only the fixed costs of ops and transfers count."""
    large: Shape = Shape(width=1024, inner=2816, num_blocks=3, outputs=8192)
    """Weights of 190 MB in float32: more than caches hold."""
    few_rows: int = 1
    many_rows: int = 64
    streamed_rows: tuple[int, ...] = (1, 16, 256)
    """The first with ops that leave the readers alone, the last with ops that readers have to wait for."""
    num_runs: int = 10


def calibrate_machine(
    *,
    cache_dir: str | os.PathLike[str],
    read: ProbeReader,
    stage: Stage = lambda name: None,
    effort: MeasuringEffort = THOROUGH,
    trials: Trials | None = None,
) -> Machine:
    """Measure this machine, correct it by runs and remember it in place of what was remembered.

    Blocks for up to half a minute and takes up to 500 MiB of memory and of disk; files are deleted in every case.

    Args:
        cache_dir: where this machine is remembered; also the disk that is measured. Made if missing.
        read: the reader that runs plans.
        stage: told what is done next.
        effort: how long to measure.
        trials: the runs that correct what was measured.

    Raises:
        StorageError: ``cache_dir`` cannot be made or written to.
    """
    folder = made_folder(Path(cache_dir))
    with warned_if_busy("this machine"):
        machine = measure_machine(folder=folder, read=read, effort=effort, stage=stage)
        machine = with_meetings(machine)
        with _scratch(folder) as scratch:
            machine = corrected_by_runs(machine, scratch, trials or Trials(), stage)
        machine = with_gpu(machine, folder, read, effort, stage)
    remember_machine(machine, folder)
    return machine


def corrected_by_runs(machine: Machine, folder: Path, trials: Trials, stage: Stage) -> Machine:
    """Return ``machine`` with overhead, rates and the link's numbers as runs of the built-in model show them."""
    stage("cost of an op")
    runs = _Runs(folder, trials.num_runs)
    machine = _correct_overhead(machine, runs, trials)
    stage("products in a run")
    machine = _correct_rates(machine, runs, trials)
    stage("small transfers in a run")
    machine = _correct_latency(machine, runs, trials)
    stage("large transfers in a run")
    return _correct_transfers(machine, runs, trials)


# ---------------------------------------------------------------- the model


class _Block(nn.Module):
    """Attention and a gated layer, as decoders have them."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.heads = max(width // 64, 1)
        self.scale = nn.Parameter(torch.empty(width))
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, width = x.shape
        y = self._normal(x)
        query, key, value = (
            layer(y).view(rows, self.heads, width // self.heads).transpose(0, 1)
            for layer in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        x = x + self.out(mixed.transpose(0, 1).reshape(rows, width))
        y = self._normal(x)
        hidden: torch.Tensor = self.down(nn.functional.silu(self.gate(y)) * self.up(y))
        return x + hidden

    def _normal(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale


def _model(shape: Shape) -> nn.Module:
    with torch.device("meta"):
        blocks = [_Block(shape.width, shape.inner) for _ in range(shape.num_blocks)]
        return nn.Sequential(*blocks, nn.Linear(shape.width, shape.outputs, bias=False)).eval()


# ---------------------------------------------------------------- its runs


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    plan: Plan
    time_s: float
    work_s: float
    """Sum of the ops' seconds without their fixed costs."""
    flops_per_byte: float

    @property
    def compute_s(self) -> float:
        return sum(op.time_s for op in self.plan.ops)

    def with_ops_of(self, still: _Run) -> _Run:
        """Return this run with ops that take what they took in another, in which nothing moved."""
        factor = still.time_s / self.compute_s
        ops = tuple(replace(op, time_s=op.time_s * factor) for op in self.plan.ops)
        return replace(self, plan=replace(self.plan, ops=ops))

    def free_s(self, machine: Machine) -> float:
        """Return what the run would take if ops and reads cost each other nothing."""
        return replay_plan(self.plan, replace(machine, interference=Interference())).seconds


class _Runs:
    def __init__(self, folder: Path, num_runs: int) -> None:
        self._folder = folder
        self._num_runs = num_runs

    def run(self, shape: Shape, rows: int, machine: Machine, *, streamed: bool) -> _Run:
        model = _model(shape)
        inputs = torch.ones(rows, shape.width)
        with compile_model(
            model,
            example_inputs=(inputs,),
            checkpoint=self._checkpoint(shape, model),
            machine=machine,
            cache_dir=self._folder,
            strategy=_STREAMED if streamed else None,
            mesh=False,
        ) as compiled:
            time_s = self._time_s(compiled, inputs)
            free = correct.with_overhead(machine, 0.0, "")
            work = annotate(compiled.program, free).workload
            moved_bytes = sum(op.read_bytes + op.write_bytes for op in work.ops if op.flops)
            return _Run(
                plan=compiled.plan,
                time_s=time_s,
                work_s=sum(op.time_s["cpu"] for op in work.ops),
                flops_per_byte=sum(op.flops for op in work.ops) / moved_bytes,
            )

    def _time_s(self, compiled: CompiledModel, inputs: torch.Tensor) -> float:
        for _ in range(2):
            compiled(inputs)
        times_s: list[float] = []
        stop = time.perf_counter() + _RUNS_LIMIT_S
        while len(times_s) < self._num_runs and not (times_s and time.perf_counter() > stop):
            start = time.perf_counter()
            compiled(inputs)
            times_s.append(time.perf_counter() - start)
        # The middle one, as a user sees it: the fastest are runs in which the disk had luck.
        return statistics.median(times_s)

    def _checkpoint(self, shape: Shape, model: nn.Module) -> Path:
        path = self._folder / f"{shape.width}.safetensors"
        if not path.exists():
            generator = torch.Generator().manual_seed(0)
            save_file(
                {
                    name: torch.empty(p.shape).uniform_(-0.02, 0.02, generator=generator)
                    for name, p in model.named_parameters()
                },
                path,
            )
            with path.open("rb+") as stream:
                os.fsync(stream.fileno())
        return path


def _correct_overhead(machine: Machine, runs: _Runs, trials: Trials) -> Machine:
    run = runs.run(trials.tiny, trials.few_rows, machine, streamed=False)
    (memory,) = machine.memory
    num_ops = round((run.compute_s - run.work_s) / memory.op_overhead_s)
    overhead_s = correct.overhead_per_op_s(
        measured_s=run.time_s, work_s=run.work_s, num_ops=num_ops
    )
    return correct.with_overhead(machine, overhead_s, f"a run of {num_ops} small kernels")


def _correct_rates(machine: Machine, runs: _Runs, trials: Trials) -> Machine:
    factors = []
    # By another name, so that the plan goes by the rates and not by what ops of this machine take.
    rated = replace(machine, name=f"{machine.name}, being calibrated")
    for rows in (trials.few_rows, trials.many_rows):
        run = runs.run(trials.large, rows, rated, streamed=False)
        factor = correct.compute_factor(
            measured_s=run.time_s,
            predicted_s=run.compute_s,
            fixed_s=run.compute_s - run.work_s,
        )
        factors.append(correct.Factor(flops_per_byte=run.flops_per_byte, factor=factor))
    how = f"runs of {trials.few_rows} and {trials.many_rows} rows in float32"
    return correct.with_compute_factors(machine, factors, how)


def _correct_latency(machine: Machine, runs: _Runs, trials: Trials) -> Machine:
    run = runs.run(trials.tiny, trials.few_rows, machine, streamed=True)

    def predict(rate: float) -> float:
        changed = correct.with_link(machine, _LINK, latency_s=1 / rate, how="")
        return replay_plan(run.plan, changed).seconds

    least_s, most_s = _LATENCY_RANGE_S
    rate = correct.fitted(predict, run.time_s, low=1 / most_s, high=1 / least_s)
    if rate is None:
        return machine
    how = f"a run that streams {len(run.plan.tensors)} small tensors"
    return correct.with_link(machine, _LINK, latency_s=1 / rate, how=how)


def _correct_transfers(machine: Machine, runs: _Runs, trials: Trials) -> Machine:
    """Fit the link on a run with little to compute, and on others what ops and reads cost each other."""
    few_rows, *others = trials.streamed_rows
    few = runs.run(trials.large, few_rows, machine, streamed=True)
    alone = machine.link(_LINK).bandwidth_bytes_per_s
    low, high = (alone * factor for factor in correct.FACTOR_RANGE)

    def few_seconds(rate: float) -> float:
        return replay_plan(
            few.plan, correct.with_link(machine, _LINK, bandwidth_bytes_per_s=rate, how="")
        ).seconds

    rate = correct.fitted(few_seconds, few.time_s, low=low, high=high) or alone
    how = f"runs of {', '.join(str(n) for n in trials.streamed_rows)} rows that stream all weights"
    machine = correct.with_link(machine, _LINK, bandwidth_bytes_per_s=rate, how=how)
    points = [InterferencePoint(flops_per_byte=few.flops_per_byte, lost_share=0.0)]
    op_s_per_byte = 0.0
    for rows in others:
        still = runs.run(trials.large, rows, machine, streamed=False)
        run = runs.run(trials.large, rows, machine, streamed=True).with_ops_of(still)
        if run.free_s(machine) <= still.time_s * (1 + _BOUND):
            # The processors had no time to spare: what the run took longer went into reading.
            op_s_per_byte = max(run.time_s - still.time_s, 0.0) / sum(run.plan.link_bytes.values())
        else:
            points.append(_point(run, machine))
    return correct.with_interference(machine, points, op_s_per_byte, how)


def _point(run: _Run, machine: Machine) -> InterferencePoint:
    """Return the share of the link that the ops of a run bound by it take."""

    def seconds(speed: float) -> float:
        points = (InterferencePoint(flops_per_byte=0.0, lost_share=1 - speed),)
        return replay_plan(run.plan, correct.with_interference(machine, points, 0.0, "")).seconds

    # The less of the link's speed is left beside ops, the longer the run takes.
    speed = correct.fitted(seconds, run.time_s, low=_LEAST_SPEED, high=1.0)
    if speed is None:
        speed = _LEAST_SPEED if run.time_s > seconds(_LEAST_SPEED) else 1.0
    return InterferencePoint(flops_per_byte=run.flops_per_byte, lost_share=1 - speed)


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    for old in folder.glob(f"{_PREFIX}*"):
        if time.time() - old.stat().st_mtime > _STALE_S:
            shutil.rmtree(old, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=_PREFIX) as scratch:
        yield Path(scratch)
