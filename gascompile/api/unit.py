"""A unit: one plan that is ready to be executed for one input signature, or for a range of sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from gascompile.api.guards import Values
from gascompile.api.matching import Misfit, as_planned, misfit, require_inputs
from gascompile.bundles.bundle import Bundle
from gascompile.bundles.reuse import Basis
from gascompile.capture.calls import Call, key_types
from gascompile.capture.saved.call_types import has_size, unflatten
from gascompile.capture.saved.program_io import load_treespec, needs_import
from gascompile.capture.torch_settings import call_settings
from gascompile.core.input_facts import facts_of
from gascompile.core.model_libraries import give_back
from gascompile.core.program import Dim
from gascompile.core.reports import GraphReport, RunReport
from gascompile.core.signature import quick_key, same_memory, same_tensors
from gascompile.core.sizes import format_size, format_time
from gascompile.machines.admission import admit_plan, device_of
from gascompile.passes.graph.insert import insert
from gascompile.passes.graph.mutated_tensors import mutated_tensors
from gascompile.passes.graph.to_device import to_device
from gascompile.passes.verify.walk import verify
from gascompile.runtime.memory.early_memory import EarlyMemory

if TYPE_CHECKING:
    from gascompile.codegen.fuse import LoadedFusion


_SHOWN = 4
"""Arguments in a line of a log."""


@dataclass(eq=False)
class Unit:
    """One plan ready to be executed for one input signature."""

    bundle: Bundle
    graph_module: torch.fx.GraphModule
    last_run: RunReport | None = None
    early: EarlyMemory | None = None
    """Memory taken ahead for the first session."""
    fusion: LoadedFusion | None = None
    """The ops that run as compiled kernels; ``None`` where all run one by one."""
    graphs: str = "auto"
    """``off`` gives a device its ops one by one."""
    graph_report: GraphReport | None = None
    is_kept: bool = False
    """Whether it was read from the cache."""
    beside: tuple[Unit, ...] = ()
    """All plans that share its arena, this one among them; none where it has one of its own."""
    again: Callable[[], tuple[Unit, ...]] | None = None
    """Makes all of those again, with what runs have taught about the memory of ops."""
    buffers: Values | None = None
    """The model's buffers that it reads; ``None`` where no model is there."""
    basis: Basis | None = None
    """The Python values that are part of the plan; ``None`` where no model is there."""
    _fit: tuple[Any, ...] = ()
    """What told the latest call that fitted from others."""
    _fits_as_is: bool = False

    @staticmethod
    def of(bundle: Bundle, *, graphs: str = "auto") -> Unit:
        """Verify the plan, ask for its device, and insert its moves."""
        verify(bundle.plan)
        admit_plan(bundle.plan)
        program = to_device(bundle.program, device_of(bundle.plan.machine))
        require_inputs(bundle.program, bundle.plan.machine)
        unit = Unit(bundle=bundle, graph_module=insert(program, bundle.plan), graphs=graphs)
        if not needs_import(bundle.program.in_spec + bundle.program.out_spec):
            _ = unit.in_spec, unit.out_spec
        return unit

    def reads(self, buffers: Values | None) -> None:
        """Take note of those of a model's ``buffers`` that the plan reads, as they were before it was made."""
        if buffers is not None:
            self.buffers = buffers.read(self.bundle.program.bound, self.bundle.held)

    @property
    def sizes_in_words(self) -> str:
        """The tensors of a call, with their sizes."""
        shown = [
            f"{of.path} [{', '.join(d.name if isinstance(d, Dim) else str(d) for d in of.shape)}]"
            for of in self.bundle.program.inputs
            if of.dtype is not None
        ]
        more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
        return ", ".join(shown[:_SHOWN]) + more

    def in_words(self, sizes: str, seconds: float) -> str:
        """Return a line on a plan that was just made: what for, from where, in which time, with how many bytes."""
        plan = self.bundle.plan
        tier = plan.machine.compute_tier
        return (
            f"{self.bundle.program.name} for {sizes or self.sizes_in_words}: "
            f"{'from the cache' if self.is_kept else 'captured and planned'} in {format_time(seconds)}, "
            f"{format_size(plan.peak_bytes[tier])} of {format_size(plan.budget_bytes[tier])}, "
            f"{format_size(sum(plan.link_bytes.values()))} move at each call"
        )

    @cached_property
    def in_spec(self) -> pytree.TreeSpec:
        """The structure of a call. Read when needed: its types may come from a library that is slow to import."""
        return load_treespec(self.bundle.program.in_spec)

    @cached_property
    def _key_types(self) -> tuple[str, ...]:
        """Of keys that may equal others of another type; empty of most calls, which are looked up at no cost."""
        return key_types(self.in_spec)

    @cached_property
    def out_spec(self) -> pytree.TreeSpec:
        """The structure of what a call returns."""
        return load_treespec(self.bundle.program.out_spec)

    def returned(self, outputs: tuple[Any, ...], call: Call) -> Any:
        """Return what the model returns at a call, whose tensors are ``outputs``."""
        found = unflatten(outputs, self.out_spec, sizes=self._has_size)
        return give_back((*call.args, *call.kwargs.values()), found)

    @cached_property
    def _has_size(self) -> bool:
        return has_size(self.out_spec)

    @cached_property
    def written(self) -> tuple[torch.Tensor, ...]:
        """The model's buffers that runs write to."""
        program, held = self.bundle.program, self.bundle.held
        if not held:
            return ()
        names = mutated_tensors(program.graph_module.graph, program.bindings)
        return tuple(
            held[name]
            for name in sorted(names & held.keys())
            if not isinstance(held[name], nn.Parameter) and not held[name].is_inference()
        )

    @cached_property
    def _writes(self) -> bool:
        return any(of.written for of in self.bundle.program.inputs)

    @cached_property
    def _asks(self) -> bool:
        return any(of.facts for of in self.bundle.program.inputs)

    def written_inputs(self, leaves: list[Any]) -> dict[str, object]:
        """Return the arguments that a call writes to, by where they stand in it."""
        if not self._writes:
            return {}
        inputs = zip(self.bundle.program.inputs, leaves, strict=True)
        return {of.path: leaf for of, leaf in inputs if of.written}

    def misfit(self, leaves: list[Any], spec: pytree.TreeSpec) -> Misfit | None:
        """Return why a call does not fit the plan, or ``None`` when it does."""
        return self._call_misfit(leaves, spec) or self.misfit_of_model()

    def misfit_of_model(self) -> Misfit | None:
        """Return which value that the capture read is another now, or ``None``."""
        changed = self.basis.changed() if self.basis is not None else None
        return Misfit(f"{changed}, which is part of the plan", is_value=True) if changed else None

    def _call_misfit(self, leaves: list[Any], spec: pytree.TreeSpec) -> Misfit | None:
        # Where tensors lie decides what is seen of writes to them; in calls that write to none nothing depends on it.
        memory = same_memory(leaves) if self._writes else ()
        key: tuple[Any, ...] = (
            quick_key(leaves),
            same_tensors(leaves),
            memory,
            spec,
            call_settings(),
        )
        if kinds := self._key_types:
            key = (*key, kinds := key_types(spec))
        if self._asks and spec == self.in_spec:
            key = (*key, facts_of(self.bundle.program.inputs, leaves))
        if key == self._fit:
            return None
        if spec != self.in_spec or kinds != self._key_types:
            return Misfit(
                f"the call has the structure {spec}, the plan was made for {self.in_spec}; pass the same arguments"
            )
        inputs = self.bundle.program.inputs
        why_not = misfit(self.bundle.plan, inputs, leaves)
        if why_not is None:
            self._fit = key
            self._fits_as_is = not as_planned(inputs, leaves)[1]
        return why_not

    def given(self, leaves: list[Any]) -> tuple[list[Any], dict[int, torch.Tensor]]:
        """Return what a call that fits gives to the plan, see ``as_planned``."""
        return (leaves, {}) if self._fits_as_is else as_planned(self.bundle.program.inputs, leaves)
