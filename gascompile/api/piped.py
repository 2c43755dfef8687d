"""A compiled model that is divided into stages, one per rank: a model larger than one machine, for requests in turn.

Each rank captures the model, has the weights of its stage alone, plans them under its own budget, and streams them from
its own drive. A call goes through the stages and ends on all of them with the same results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from gascompile.api.compile import Job
from gascompile.api.compiled import CompiledModel
from gascompile.api.looked_up import LookedUp
from gascompile.api.ranked import (
    RunnerInStep,
    refuse,
    require_of_ranks,
)
from gascompile.api.started import started
from gascompile.api.unit import Unit
from gascompile.bundles.content import require_same_files
from gascompile.bundles.reuse import CachedPlan
from gascompile.capture.calls import Call
from gascompile.core import serial
from gascompile.core.errors import UnsupportedOpError
from gascompile.core.plan import Plan
from gascompile.core.program import Program, draws, program_marks
from gascompile.core.ranks import STAGE_OPS
from gascompile.core.value_digests import digest_of
from gascompile.cost_models.measure.host import works_with
from gascompile.passes.parallel.legs import Legs, outstanding_bytes, placeholders, roots, staged
from gascompile.passes.parallel.stage_graph import Cut, StageGraph
from gascompile.runtime.collectives.exchange import exchanging

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from gascompile.capture.to_program import Capture
    from gascompile.distributed.ranks import Ranks
    from gascompile.passes.graph.annotate import Annotation
    from gascompile.runtime.run.executor import Executor
    from gascompile.training.pipeline.stage_problem import Staged

forced: Callable[[int, int], Sequence[int]] | None = None
"""Takes the place of the choice, for tests: returns where stages begin, by the number of ops and of stages."""


@dataclass(slots=True)
class Stages:
    """What the ranks of a pipeline have agreed on."""

    ranks: Ranks
    held: dict[str, int] = field(default_factory=dict)
    """Weight -> the first stage that has it, from the first plan on."""
    note: str = ""
    sent_bytes: int = 0
    """Of the plan that is being made, on their way at once."""


@dataclass(frozen=True, kw_only=True)
class PipedJob(Job):
    """A job of one stage of a model."""

    stages: Stages
    why_not_kept = "ranks agree on the stages of a pipeline each time"

    def look_up(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> LookedUp:
        """Return where the plan would lie in the cache: ranks agree on stages each time."""
        return replace(super().look_up(args, kwargs), unit=None)

    def capture(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], entry: CachedPlan | None = None
    ) -> Capture:
        """Trace the model, and return the stage of this rank."""
        whole = super().capture(args, kwargs, entry)
        return replace(whole, program=self._stage(whole.program))

    def _stage(self, program: Program) -> Program:
        """Return what this rank runs of a model.

        Raises:
            InfeasiblePlanError: a rank's budget is too small for an op of any division.
            RankError: another rank has failed.
            UnsupportedOpError: the model has what stages do not; names it.
        """
        _require_stateless(program)
        ranks, size = self.stages.ranks, self.stages.ranks.layout.size
        ranks.compare("the captured model", serial.digest(program_marks(program)).encode())
        staging = self._staged(program)
        if len(staging.ops) < size:
            raise UnsupportedOpError(
                f"a model of {len(staging.ops)} ops cannot be {size} stages; use fewer ranks"
            )
        legs = self._legs(program, staging)
        cut = Cut(legs=legs, orders=_orders(size), num_batches=1, rows={})
        own = list(roots(program.graph_module.graph.output_node(), legs.leg_of))
        late = [n.meta["val"] for n in own if legs.leg_of[n] == ranks.layout.rank]
        self.stages.sent_bytes = outstanding_bytes(legs, cut.orders, ranks.layout.rank)
        self.stages.sent_bytes += sum((size - 1) * x.numel() * x.element_size() for x in late)
        return _program_of(program, cut, ranks.layout.rank)

    def _staged(self, program: Program) -> Staged:
        from gascompile.training.pipeline.stage_problem import Staged

        sizes = {p: program.bound[name].size_bytes for p, name in program.bindings.items()}
        ops = staged(program.graph_module.graph, sizes, sizes)
        return Staged(ops=ops, num_forward=len(ops))

    def _legs(self, program: Program, staging: Staged) -> Legs:
        from gascompile.training.pipeline.agreement import StageMemory, agreed_cut
        from gascompile.training.pipeline.pipeline import stages_of
        from gascompile.training.pipeline.stage_problem import holders_of

        size, own = self.stages.ranks.layout.size, set(staging.ops)
        names = program.bindings
        if self.stages.held:
            stages = _as_before(staging.ops, names, self.stages.held, size)
        elif forced is not None:
            stages = stages_of(forced(len(staging.ops), size), len(staging.ops))
        else:
            workload = self.annotated(program).workload
            memory = StageMemory.of(self.machine, self.limit_bytes)
            of_ops = names, workload, 0
            choice, self.stages.note = agreed_cut(
                self.stages.ranks, staging, of_ops, memory, [1], has_backward=False
            )
            stages = stages_of(choice.begins, len(staging.ops))
        for node, stage in zip(staging.ops, stages, strict=True):
            for source in placeholders(node, own):
                if source.name in names:
                    self.stages.held.setdefault(names[source.name], stage)
        return staging.legs(stages, size, holders_of(staging.ops, stages))

    def annotated(self, program: Program, sites: Sequence[str] = ()) -> Annotation:
        """Return the costs of a stage, with what it takes to receive."""
        from gascompile.distributed import stage_ops

        annotation, ladder = super().annotated(program, sites), self.stages.ranks.ladder()
        coming = {n.name: n for n in program.op_nodes() if n.target is stage_ops.receive}
        times_s = {
            name: ladder.seconds(stage_ops.message_bytes(node.target, node.args), divided=False)
            for name, node in coming.items()
        }
        ops = tuple(
            replace(op, time_s={self.machine.compute_tier: times_s[op.name]})
            if op.name in times_s
            else op
            for op in annotation.workload.ops
        )
        own = {n.name for n in program.op_nodes() if stage_ops.is_of_stages(n.target)}
        return replace(
            annotation,
            workload=replace(annotation.workload, ops=ops),
            unknown_ops=tuple(op for op in annotation.unknown_ops if STAGE_OPS not in op),
            unproven={op: call for op, call in annotation.unproven.items() if op not in own},
        )

    def place(self, program: Program, prints: Mapping[str, str]) -> Plan:
        """Annotate and plan a stage, with room for what it sends."""
        job = replace(self, reserved_bytes=self.reserved_bytes + self.stages.sent_bytes)
        plan = super(PipedJob, job).place(program, prints)
        note = (self.stages.note,) if self.stages.note else ()
        return replace(plan, warnings=(*plan.warnings, *note))


class PipedRunner(RunnerInStep):
    """Runs calls of a model on its stages, with the same inputs on all ranks."""

    _ranks: Ranks

    def __init__(self, stages: Stages, **given: Any) -> None:
        """Open the first plan, on all ranks; ``given`` is as ``Runner`` takes it."""
        self._ranks = stages.ranks
        super().__init__(**given)

    def _in_step(self, run: Callable[[], Any]) -> Any:
        with self._ranks.together(), exchanging(self._ranks.exchange), self._ranks.in_a_step():
            return run()

    def _unit_for(self, call: Call) -> Unit:
        if not self._is_planning:
            facts = serial.digest([digest_of(call.leaves), str(call.spec)]).encode()
            self._ranks.compare(
                "the inputs of a call, which are the same on all ranks of a pipeline", facts
            )
        return super()._unit_for(call)

    def _activate(self, unit: Unit) -> Executor:
        if self._open.has(unit):
            executor = self._open.use(unit)
        else:
            self._open.close()
            executor = self._open.open(unit)
        # Ranks go on once all have their weights: no one waits for another's memory in a call.
        predicted = int(unit.bundle.plan.certificate.predicted_s * 1e6)
        table = self._ranks.compare("the plan of a call", b"", [predicted])
        self._ranks.expect(sum(row[0] for row in table) * 1e-6)
        return executor


def compiled_in_stages(
    mesh: DeviceMesh,
    make: Callable[..., Job],
    budget: Any,
    machine: Any,
    given: tuple[tuple[Any, ...], Mapping[str, Any]] | None,
) -> CompiledModel:
    """Return the compiled model of this process, one stage of a pipeline; alone where it is the only one."""
    from gascompile.distributed.finding import find_ranks

    stages = find_ranks(mesh)
    if stages is None:
        return started(make(budget=budget, machine=machine), given)
    works_with(stages.processes)
    with stages.together():
        job = _job(Stages(stages), make, budget, machine)
        _require_same_weights(job)
        return started(job, given, partial(PipedRunner, job.stages))


def _job(stages: Stages, make: Callable[..., Job], budget: Any, machine: Any) -> PipedJob:
    job = make(budget=budget, machine=machine)
    require_of_ranks(job, "stages of a pipeline send each other values in the host's memory")
    if job.dynamic_shapes:
        refuse("stages of a pipeline are planned for one size of inputs each")
    # An op that receives is not to run again, as others may where activations move.
    given = job.parts() | {"dynamic_shapes": False, "in_arena": True}
    return PipedJob(**given, stages=stages)


def _require_same_weights(job: PipedJob) -> None:
    """Return once it is known that all ranks have the same weights, each as far as it reads them.

    Raises:
        RankMismatchError: they have not.
    """
    ranks, checkpoint = job.stages.ranks, job.open_checkpoint()
    paths = [stamp.path for stamp in checkpoint.stamps] if checkpoint else []
    require_same_files(paths, ranks.compare, job.config.cache_dir)
    own = dict(job.model.named_buffers())
    if checkpoint is None:
        own |= dict(job.model.named_parameters())
    values = [tensor.detach() for _, tensor in sorted(own.items()) if not tensor.is_meta]
    ranks.compare("the values of the model's tensors", digest_of(values).encode())


def _require_stateless(program: Program) -> None:
    if any(of.written for of in program.inputs):
        refuse("calls write to their inputs")
    for node in program.op_nodes():
        target = node.target
        if isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable:
            states = ", ".join(sorted(program.states))
            refuse(f"calls change {states} by {target}, which stages of a pipeline do not keep")
        if draws(node.target) and not _is_certain(node):
            refuse(f"{node.target} draws random numbers, others on each rank")


def _is_certain(node: fx.Node) -> bool:
    """Return whether an op that may draw random numbers needs none, as attention without dropout."""
    target: Any = node.target
    names = [argument.name for argument in target._schema.arguments]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return given.get("dropout_p", 0 if "dropout_p" in names else None) == 0


def _orders(size: int) -> list[Any]:
    from gascompile.training.pipeline.schedule import orders

    return list(orders(size, 1, has_backward=False))


def _as_before(
    ops: Sequence[fx.Node], names: Mapping[str, str], held: Mapping[str, int], size: int
) -> list[int]:
    """Return stages under which each weight is where it was for inputs of another kind."""
    own, stage, stage_of = set(ops), 0, []
    for node in ops:
        stages = [held[names[s.name]] for s in placeholders(node, own) if names.get(s.name) in held]
        # One that two stages have is read by the later one's ops, too.
        stage = max([stage, *stages])
        stage_of.append(min(stage, size - 1))
    return stage_of


def _program_of(program: Program, cut: Cut, rank: int) -> Program:
    """Return the program of a rank, whose outputs are the whole model's."""
    from gascompile.distributed import stage_ops

    graph, legs = program.graph_module.graph, cut.legs
    output, own = graph.output_node(), legs.leg_of.keys()
    to = StageGraph(cut=cut, rank=rank, ops=(stage_ops.send, stage_ops.receive))
    inputs = {of.name for of in program.inputs}
    results = roots(output, own)
    needed = {s for n, leg in legs.leg_of.items() if leg == rank for s in placeholders(n, own)}
    needed |= set(placeholders(output, own))
    to.add_placeholders(
        [n for n in graph.nodes if n.op == "placeholder" and (n in needed or n.name in inputs)]
    )
    to.run()
    tag = to.num_tags
    for value in results:
        source = legs.rank_of(legs.leg_of[value])
        for other in range(legs.num_stages):
            if other != source and rank == source:
                to.send(to.made[value, 0], other, tag)
            elif other == rank and rank != source:
                to.made[value, 0] = to.receive(value, source, tag)
            tag += 1
    given = {node: to.value(node, 0) for node in output.all_input_nodes}
    to.graph.output(fx.node.map_arg(output.args[0], given.__getitem__))
    bindings = {p: n for p, n in program.bindings.items() if p in {k.name for k in to.whole}}
    held = set(bindings.values())
    return replace(
        program,
        graph_module=fx.GraphModule(torch.nn.Module(), to.graph),
        bindings=bindings,
        states=program.states & held,
        bound={name: of for name, of in program.bound.items() if name in held},
        forms={name: of for name, of in program.forms.items() if name in held},
    )
