"""The training step that users call: planned once per kind of batch, run under a budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.utils import _pytree as pytree

from gascompile import serial
from gascompile.config import CompileConfig
from gascompile.ir import Budget, Machine, Plan, Workload
from gascompile.passes.make_plan import make_plan
from gascompile.progress import task
from gascompile.reports import RunReport
from gascompile.runtime.early_memory import map_anonymous
from gascompile.runtime.iteration import Iteration
from gascompile.runtime.persistent import Persistent
from gascompile.training.joint import LossFunction, capture_joint
from gascompile.training.optimizers import Rules
from gascompile.training.settings import Settings, require_known
from gascompile.training.step_program import StepProgram, step_program
from gascompile.training.step_workload import step_workload
from gascompile.units import SPILL_BUFFER_BYTES

_BUFFERS = 4
"""Parts of the transfer buffers: out and in, of what persists and of activations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unit:
    """The step for one kind of batch."""

    program: StepProgram
    plan: Plan
    iteration: Iteration


class TrainingStep:
    """A compiled training step. Not for several threads at once.

    While it is open the model's own parameters are empty: ``state_dict`` returns their values, and
    ``close`` puts them back.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        optimizer: torch.optim.Optimizer,
        *,
        budget: Budget,
        machine: Machine,
        config: CompileConfig,
        settings: Settings,
    ) -> None:
        """Take the model over; see ``compile_step``."""
        self._model, self._loss_fn, self.optimizer = model, loss_fn, optimizer
        self._budget, self._machine, self._config = budget, machine, config
        self._settings = settings
        self._num_batches = 0
        self._units: dict[str, _Unit] = {}
        self._persistent: Persistent | None = None
        self._buffers = map_anonymous(_BUFFERS * SPILL_BUFFER_BYTES)
        self.num_steps = 0
        self.plan: Plan | None = None
        self.last_run: RunReport | None = None

    def __call__(self, batch: Any) -> torch.Tensor:
        """Run one step: forward, backward and update. Return the loss, a scalar without a graph.

        The first batch of new shapes is planned for first.

        Raises:
            InfeasiblePlanError: the budget is too small for batches of this shape; names the smallest.
            StorageError: a transfer failed.
        """
        updates = self._settings.updates_at(self._num_batches)
        unit = self._unit(batch, updates=updates)
        leaves = pytree.tree_leaves(batch)
        number = self.num_steps + 1
        hyper = [self._rules.hyper(group, number) for group in range(unit.program.num_groups)]
        for other in self._units.values():
            if other is not unit:
                other.iteration.settle()
        with self._settings.watch(number):
            (loss,), self.last_run = unit.iteration.run([*leaves, *hyper])
        self._num_batches += 1
        self.plan = unit.plan
        if updates:
            self.num_steps = number
            # What schedulers look at to see that the optimizer has stepped before them.
            self.optimizer._opt_called = True  # type: ignore[attr-defined]
        found: torch.Tensor = loss.detach()
        return found

    def prepare(self, batch: Any) -> None:
        """Plan for batches like this one, unless that has been done."""
        for number in range(min(self._settings.accumulate, 2)):
            self._unit(batch, updates=number == 0)

    def _unit(self, batch: Any, *, updates: bool) -> _Unit:
        leaves, spec = pytree.tree_flatten(batch)
        kinds = [
            [str(x.dtype), list(x.shape)] if isinstance(x, torch.Tensor) else repr(x)
            for x in leaves
        ]
        kind = serial.digest([str(spec), kinds, self._model.training])
        key = f"{kind} {updates}"
        if key not in self._units:
            others = sum(not other.startswith(kind) for other in self._units)
            self._settings.require_replan(kinds, others)
            self._units[key] = self._planned(batch, updates=updates)
            self.plan = self._units[key].plan
        return self._units[key]

    def _planned(self, batch: Any, *, updates: bool) -> _Unit:
        self._settle()
        with self._whole_model(), task(f"Capturing a step of {type(self._model).__name__}"):
            joint = capture_joint(self._model, self._loss_fn, batch)
            names = {id(tensor): name for name, tensor in joint.tensors.items()}
            self._rules = Rules(self.optimizer, names, list(joint.gradients))
            name = f"step of {type(self._model).__name__}"
            tensors = dict(joint.tensors)
            options = self._settings.program(updates=updates)
            program = step_program(joint, self._rules, name=name, options=options)
        with task("Planning"):
            workload = step_workload(program, self._machine)
            plan = self._plan(workload)
        persistent = self._own(program, tensors)
        half = 2 * SPILL_BUFFER_BYTES
        iteration = Iteration(
            program.program.graph_module.graph,
            plan,
            persistent,
            program.program.bindings,
            [spec.name for spec in program.program.inputs],
            folder=self._config.cache_dir / "training",
            buffers=memoryview(self._buffers)[half:],
        )
        return _Unit(program=program, plan=plan, iteration=iteration)

    def _plan(self, workload: Workload) -> Plan:
        prints = {
            "graph": serial.digest(workload),
            "machine": serial.digest(self._machine),
            "budget": serial.digest(self._budget.limits_bytes(self._machine)),
            "options": serial.digest(self._config.fingerprint_fields()),
        }
        return make_plan(
            workload,
            self._machine,
            self._budget,
            fingerprint=prints,
            time_limit_s=self._config.time_limit_s,
            mip_gap=self._config.mip_gap,
            reserved_bytes=_BUFFERS * SPILL_BUFFER_BYTES,
            move_all=True,
        )

    def _whole_model(self) -> Any:
        """Return a context in which the model's parameters have their shapes again."""
        return _Shapes(self._persistent, self._tensors if self._persistent else {})

    def _own(self, program: StepProgram, tensors: Mapping[str, torch.Tensor]) -> Persistent:
        """Take parameters, buffers and moments over at the first plan."""
        if self._persistent is not None:
            require_known({*tensors, *program.tiles}, self._persistent.sizes)
            return self._persistent
        self._tensors = dict(tensors)
        own: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            own[name] = tensor.detach()
            tensor.data = torch.empty(0, dtype=tensor.dtype)
        self._persistent = Persistent(
            own,
            {name: tile.end - tile.begin for name, tile in program.tiles.items()},
            self._config.cache_dir / "training",
            memoryview(self._buffers)[: 2 * SPILL_BUFFER_BYTES],
        )
        return self._persistent

    def _settle(self) -> None:
        for unit in self._units.values():
            unit.iteration.settle()

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the model's and the optimizer's states, in torch's own formats."""
        self._settle()
        assert self._persistent is not None
        found = {name: self._persistent.value(name) for name in self._tensors}
        model = {}
        for name, tensor in self._named():
            model[name] = found[name] if name in found else tensor.detach().clone()
        return {"model": model, "optimizer": self._optimizer_state()}

    def _named(self) -> list[tuple[str, torch.Tensor]]:
        names = self._model.state_dict(keep_vars=True)
        return list(names.items())

    def _optimizer_state(self) -> dict[str, Any]:
        assert self._persistent is not None
        found: dict[str, Any] = self.optimizer.state_dict()
        state = {}
        for slot in self._rules.slots.values() if self.num_steps else ():
            shape = self._persistent.tensors[slot.name].shape
            keys = self._rules.keys(self.optimizer.param_groups[slot.group])
            entry: dict[str, Any] = {}
            if self._rules.is_adam:
                entry["step"] = torch.tensor(float(self.num_steps))
            for number, key in enumerate(keys):
                parts = [self._persistent.value(tiles[number].name) for tiles in slot.tiles]
                entry[key] = torch.cat(parts).view(shape)
            state[slot.index] = entry
        return {**found, "state": state}

    def close(self) -> None:
        """Put the parameters back into the model and give memory and files back; idempotent."""
        if self._persistent is None:
            return
        self._settle()
        for name, tensor in self._tensors.items():
            tensor.data = self._persistent.value(name)
        for unit in self._units.values():
            unit.iteration.close()
        self._persistent.close()
        self._persistent, self._units = None, {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _Shapes:
    """Gives emptied parameters their shapes back while something looks at them, without memory."""

    def __init__(self, persistent: Persistent | None, tensors: Mapping[str, torch.Tensor]) -> None:
        self._persistent, self._tensors = persistent, tensors

    def __enter__(self) -> None:
        if self._persistent is not None:
            for name, tensor in self._tensors.items():
                tensor.data = self._persistent.tensors[name]

    def __exit__(self, *_: object) -> None:
        if self._persistent is not None:
            for tensor in self._tensors.values():
                tensor.data = torch.empty(0, dtype=tensor.dtype)
