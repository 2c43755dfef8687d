"""What the ops of a step cost on this machine: the seconds and the scratch memory of each kind, measured once.

It takes as long as a few layers do, however deep the model is. Figures are remembered beside those of the machine; of
several ranks those of ops that all ranks run at the same time, as they do in a step.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from gascompile.core import serial
from gascompile.core.budget import Budget
from gascompile.core.errors import BudgetExceededError
from gascompile.core.machine import Machine
from gascompile.core.plan import Plan
from gascompile.core.program import Program
from gascompile.core.remembered import remembered
from gascompile.core.workload import Workload
from gascompile.distributed.ladder import Ladder
from gascompile.distributed.together import TimedTogether
from gascompile.machines.busy import warned_if_busy
from gascompile.machines.device_calls import calls_of
from gascompile.machines.op_memory import device_bytes, learn, learnt_bytes, reserving
from gascompile.machines.op_times import computes_here, computes_on_gpu, device_times, keep_times
from gascompile.machines.resolve import step_times_path, this_machine_name
from gascompile.runtime.memory.pages import Pages
from gascompile.training.optimizers import rank_ops
from gascompile.training.planning.rank_overlap import network_of, waits_s, with_flying
from gascompile.training.planning.step_program import StepProgram
from gascompile.training.planning.step_rehearsal import OpCost, StepRehearsal
from gascompile.training.planning.step_workload import step_workload

_FORMAT = "gascompile.step_costs/1"
_WORTH_S = 0.02
"""A step that runs for less is planned by formulas: measuring would take longer than it saves."""
_MOST_BYTES = 1 << 30
"""Of made-up values, as far as single ops do not need more."""
_MORE_S = 3.0
"""Of more passes over the ops, where ranks share a plan: what one op takes moves rows and shards of all of them."""
_OWN = ("aten", "prims", "gascompile")
"""Beginnings of the namespaces of ops that may be run on made-up values."""
_OF_STEP = re.compile(r"\d+ threads ")
"""Beginning of ``_call``; kinds of forward passes' ops begin with the op."""
_NOT_UPDATES = ("accumulate", "clip_scale", "refuse_nan", "total_norm")
"""Ops of the namespace of updates that are none."""


def costed_workload(
    program: StepProgram,
    machine: Machine,
    budget: Budget,
    *,
    cache_dir: Path,
    pages: Pages | None,
    sites: Sequence[str] = (),
    ladder: Ladder | None = None,
    together: TimedTogether | None = None,
) -> Workload:
    """Return the planning problem of a step with what its ops were found to take here.

    Args:
        program: of the step.
        machine: where it runs.
        budget: for it.
        cache_dir: where figures are remembered.
        pages: where large values lie.
        sites: other tiers whose processors may run updates.
        ladder: what exchanges between ranks take.
        together: with the ranks that plan at the same time.

    Raises:
        StorageError: ``cache_dir`` cannot be made.
    """
    workload = step_workload(program, machine, sites=sites)
    costs = step_costs(
        program.program,
        workload,
        machine,
        cache_dir=cache_dir,
        room_bytes=_room_bytes(program, budget.limits_bytes(machine)[machine.compute_tier]),
        pages=pages,
        updates_alone=not computes_here(machine) and bool(sites),
        together=together,
    )
    costed = workload
    if computes_here(machine):
        costed = with_costs(workload, costs, device=machine.compute_tier)
    if computes_on_gpu(machine):
        # Ranks that share a device would time each other.
        is_timed = together is None
        costed = _on_device(workload, program.program, machine, cache_dir, is_timed=is_timed)
    for site in sites:
        able = {op.name for op in workload.ops if site in op.time_s}
        there = {name: cost for name, cost in costs.items() if name in able}
        costed = with_costs(costed, there, device=site)
    if ladder is not None:
        others_s = {op.name: op.time_s[machine.compute_tier] for op in costed.ops}
        waits = waits_s(program, others_s, network_of(program, ladder))
        exchanged = {name: OpCost(time_s, 0) for name, time_s in waits.items()}
        costed = with_costs(costed, exchanged, device=machine.compute_tier)
        costed = with_flying(costed, program)
    return _with_learnt(costed, program.program, cache_dir)


def remember(program: Program, plan: Plan, error: BudgetExceededError, cache_dir: Path) -> bool:
    """Keep what a stopped step of ``plan`` has taught about its op for the next plan; False where it taught nothing."""
    for node in program.op_nodes():
        if node.name == error.op:
            learn(_call(node), plan, error, cache_dir)
            return True
    return False


def learnt_digest(cache_dir: Path) -> str:
    """Return a digest of what stopped steps have taught: plans from before it are of no use."""
    learnt = learnt_bytes(cache_dir)
    return serial.digest({call: learnt[call] for call in learnt if _OF_STEP.match(call)})


def _on_device(
    workload: Workload, program: Program, machine: Machine, cache_dir: Path, *, is_timed: bool
) -> Workload:
    """Return ``workload`` with the scratch memory that its ops were found to take on this machine's GPU.

    With ``is_timed`` also with their seconds, where a step takes so long that they matter.
    """
    calls = calls_of(node for node in program.op_nodes() if _kind(node) is not None)
    kinds = {node.name: _call(node) for node in program.op_nodes() if node.name in calls}
    found = reserving(workload, device_bytes(kinds, calls, machine, cache_dir))
    tier = machine.compute_tier
    if not is_timed or sum(op.time_s[tier] for op in found.ops) < _WORTH_S:
        return found
    costly = sorted(found.ops, key=lambda op: -op.time_s[tier])
    kinds = {op.name: kinds[op.name] for op in costly if op.name in kinds}
    times_s = device_times(kinds, calls, machine, cache_dir)
    return with_costs(found, {op: OpCost(s, 0) for op, s in times_s.items()}, device=tier)


def _with_learnt(workload: Workload, program: Program, cache_dir: Path) -> Workload:
    learnt = learnt_bytes(cache_dir)
    if not learnt:
        return workload
    sizes = {node.name: learnt.get(_call(node), 0) for node in program.op_nodes()}
    ops = tuple(
        replace(op, workspace_bytes=max(op.workspace_bytes, sizes.get(op.name, 0)))
        for op in workload.ops
    )
    return replace(workload, ops=ops)


def _room_bytes(program: StepProgram, budget_bytes: int) -> int:
    """Return what a budget leaves beside parameters and buffers, which may all be in memory at this time."""
    tiles = program.tiles
    held = [name for name in program.program.bound if name not in tiles or tiles[name].is_part]
    return max(budget_bytes - sum(program.program.bound[name].size_bytes for name in held), 0)


def with_costs(workload: Workload, costs: Mapping[str, OpCost], *, device: str) -> Workload:
    """Return ``workload`` with the figures of the ops that ``costs`` names."""
    ops = tuple(
        replace(
            op,
            time_s={**op.time_s, device: costs[op.name].time_s},
            workspace_bytes=max(op.workspace_bytes, costs[op.name].scratch_bytes),
        )
        if op.name in costs
        else op
        for op in workload.ops
    )
    return replace(workload, ops=ops)


def step_costs(
    program: Program,
    workload: Workload,
    machine: Machine,
    *,
    cache_dir: Path,
    room_bytes: int,
    pages: Pages | None,
    updates_alone: bool = False,
    together: TimedTogether | None = None,
) -> Mapping[str, OpCost]:
    """Return the costs by op name, of all that can be run on made-up values, where ``machine`` is this one.

    Or those of updates alone, as this processor takes them beside a device of this machine.

    The first plan of a program takes about as long as a step of four layers to measure them, and a third of
    ``room_bytes`` beside what the single op needs.

    Raises:
        StorageError: ``cache_dir`` cannot be made.
    """
    total_s = sum(op.time_s[machine.compute_tier] for op in workload.ops)
    is_here = machine.name == this_machine_name() if updates_alone else computes_here(machine)
    if not is_here or total_s < _WORTH_S:
        if together is not None:
            together.begin(is_needed=False)
        return {}
    kinds = _kinds(program, updates_alone=updates_alone, together=together)
    path = step_times_path(cache_dir)
    known = remembered(path, _FORMAT, "the remembered costs", _costs) or {}
    missing = {kind for kind in kinds.values() if kind is not None} - set(known)
    if together is not None:
        together.begin(is_needed=bool(missing))
    if missing:
        rehearsal = StepRehearsal(kinds, missing, min(room_bytes // 3, _MOST_BYTES))
        context = pages.active(0) if pages else torch.no_grad()
        quiet = warned_if_busy("this step")
        with quiet, context, torch.no_grad(), torch.random.fork_rng(devices=()):
            # A step finds its pages taken by the one before; so are these, before anything is timed.
            torch.empty(min(room_bytes // 3, _MOST_BYTES), dtype=torch.uint8).fill_(0)
            more_s = 0.0 if together is None else _MORE_S
            known = {**known, **rehearsal.run(pages, more_s=more_s)}
        if pages is not None:
            pages.trim()
        text = json.dumps({"format": _FORMAT, "costs": serial.to_json(known)}, indent=1)
        keep_times(path, text)
    return {node.name: known[kind] for node, kind in kinds.items() if kind and kind in known}


def _kinds(
    program: Program, *, updates_alone: bool, together: TimedTogether | None
) -> dict[fx.Node, str | None]:
    """Return the kind of each op that is to be timed; beside the ops of other ranks it takes longer than alone."""
    beside = f" beside {together.num_others}" if together is not None else ""
    kinds = {
        node: _kind(node) if _is_update(node.target) or not updates_alone else None
        for node in program.op_nodes()
    }
    return {node: kind and f"{kind}{beside}" for node, kind in kinds.items()}


def _kind(node: fx.Node) -> str | None:
    """Return what an op's cost depends on; ``None`` where sizes are not known, or the op is a user's own.

    The latter may do more than return a value, and may check less than torch's ops do.
    """
    target = node.target
    if isinstance(target, torch._ops.OpOverload) and not target.namespace.startswith(_OWN):
        return None
    if rank_ops.exchanges(target):
        return None  # other ranks would have to run it, too
    for leaf in pytree.tree_leaves((node.args, node.kwargs)):
        for value in pytree.tree_leaves(leaf.meta.get("val") if isinstance(leaf, fx.Node) else ()):
            if isinstance(value, torch.Tensor) and not all(
                isinstance(n, int) for n in (*value.shape, *value.stride())
            ):
                return None
    return _call(node)


def _call(node: fx.Node) -> str:
    """Return an op in words, with its constants and how its tensors lie."""
    target = node.target
    parts = [f"{torch.get_num_threads()} threads", str(node.target)]
    # Last of an update's arguments is the parameter's row, which costs nothing.
    args = node.args[:-1] if _is_update(target) else node.args
    for leaf in pytree.tree_leaves((args, node.kwargs)):
        if not isinstance(leaf, fx.Node):
            parts.append(repr(leaf))
            continue
        parts += [
            f"{value.dtype}{tuple(value.shape)}{tuple(value.stride())}"
            for value in pytree.tree_leaves(leaf.meta.get("val"))
            if isinstance(value, torch.Tensor)
        ]
    return " ".join(parts)


def _is_update(target: object) -> bool:
    name = str(target).removeprefix("gascompile_updates.")
    return name != str(target) and not name.startswith(_NOT_UPDATES)


def _costs(data: Any) -> Mapping[str, OpCost]:
    return {
        str(kind): OpCost(float(cost["time_s"]), int(cost["scratch_bytes"]))
        for kind, cost in data["costs"].items()
    }
