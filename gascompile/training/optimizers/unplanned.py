"""Unplanned optimizers: torch's own update of all parameters at once, after planned forward and backward passes.

Gradients are added up in totals that persist. For an update, parameters and totals come into memory, where
``optimizer.step()`` finds them as ever. Its state stays in memory, beside the plan.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from gascompile.core.deferral import deferring
from gascompile.core.errors import UnsupportedOpError
from gascompile.core.plan import Plan
from gascompile.core.sizes import format_size
from gascompile.training.optimizers.lent_memory import (
    num_alone,
    num_holders,
    require_returned,
    take_back,
)
from gascompile.training.optimizers.optimizers import SUPPORTED, Rules
from gascompile.training.optimizers.update_ops import total_norm_of
from gascompile.training.settings import Settings
from gascompile.training.state.open_tensors import OpenTensor
from gascompile.training.state.train_state import States


class UnplannedRules(Rules):
    """Knows the parameters of any optimizer of torch's."""

    plans_updates = False

    def require(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse what cannot be stepped by a call alone."""
        require_step(optimizer)

    def ranges(self, parameter: torch.Tensor) -> list[tuple[int, int]]:
        """Return one range: gradients are tensors of their own."""
        return [(0, parameter.numel())]

    def keys(
        self,
        group: Mapping[str, Any],  # noqa: ARG002 - of all groups
        num_dimensions: int,  # noqa: ARG002 - and parameters
    ) -> tuple[str, ...]:
        """Return nothing: what the optimizer keeps is its own."""
        return ()

    def hyper(
        self,
        group: int,
        counts: Mapping[str, int],  # noqa: ARG002 - the optimizer has its own
        number: int,
    ) -> torch.Tensor:
        """Return the number of the step alone."""
        hyper = torch.zeros(self.hyper_length(group), dtype=torch.float64)
        hyper[-1] = number
        return hyper


def require_step(optimizer: torch.optim.Optimizer) -> None:
    """Refuse optimizers that more than gradients are needed for.

    Raises:
        UnsupportedOpError: says why.
    """
    kind = type(optimizer)
    if not hasattr(optimizer, "_optimizer_state_dict_post_hooks"):
        raise UnsupportedOpError(
            f"{kind.__name__} has not called torch.optim.Optimizer.__init__, without which its state cannot be "
            "followed; call it, or pass the optimizer that it wraps"
        )
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UnsupportedOpError(
            f"{kind.__name__} computes the loss several times per update by a closure, and a planned step computes it "
            "once; use an optimizer whose step() takes no closure"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise UnsupportedOpError("SparseAdam takes sparse gradients alone; use Adam")


@deferring
def update(states: States, settings: Settings) -> torch.Tensor | None:
    """Let the optimizer take a step, whole, and return the norm of gradients where that is wanted.

    No transfer may be under way.

    Parameters that have gradients are in memory then, and these, too. Others have none, as in eager.

    Raises:
        StorageError: a value cannot be read.
        UnsupportedOpError: see ``take_back``.
    """
    persistent, tensor = states.persistent, states.tensor
    trained = [slot for slot in states.rules.slots.values() if slot.name in states.pending]
    totals = {slot.name: slot.totals[0].name for slot in trained}
    wanted = {*map(states.owner, totals), *totals.values()}
    persistent.rest({n for n in persistent.sizes if persistent.is_away(n)} - wanted)
    own = {name: tensor(name) for name in totals}
    lent = {name: states.in_memory(name) for name in totals}
    gradients = {name: persistent.tensors[total] for name, total in totals.items()}
    every = {**{f"{name}.grad": total for name, total in gradients.items()}, **lent}
    holders = num_holders(every)
    # All others stay open: what reads or writes one, without a gradient, does so where its value is.
    states.covers.lift_for_step(totals)
    try:
        for name, parameter in own.items():
            like = states.like(name)
            parameter.data = lent[name]
            parameter.grad = gradients[name].as_strided(like.shape, like.stride())
        norm = None
        if settings.max_grad_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_([*own.values()], settings.max_grad_norm)
        elif settings.grad_norm and totals:
            norm = total_norm_of([torch.linalg.vector_norm(total) for total in gradients.values()])
        states.optimizer.step()
        moved = take_back(states.optimizer, own, lent, gradients)
        for total in gradients.values():
            total.zero_()
    finally:
        for parameter in own.values():
            parameter.grad, parameter.data = None, torch.empty(0, dtype=parameter.dtype)
        persistent.changed(wanted)
        states.covers.put()
    require_returned(states.optimizer, every, holders)
    require_returned(states.optimizer, moved, num_alone(moved))
    return norm


def changed_by(states: States) -> frozenset[str]:
    """Return the persistent tensors that updates outside of plans change."""
    if states.rules.plans_updates:
        return frozenset()
    return frozenset(map(states.owner, states.rules.slots))


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return what the tensors of an optimizer's state take."""
    return sum(
        value.untyped_storage().nbytes()
        for entry in optimizer.state.values()
        for value in (entry.values() if isinstance(entry, dict) else ())
        if isinstance(value, torch.Tensor)
        and not isinstance(value, OpenTensor)
        and value.layout is torch.strided
    )


class BudgetWatch:
    """Says with numbers that updates need more than the budget."""

    def __init__(self, transfer_bytes: int) -> None:
        """Watch a step that has buffers of ``transfer_bytes``."""
        self._transfer_bytes = transfer_bytes
        self._said_bytes = 0

    def look(self, states: States, plan: Plan) -> None:
        """Warn where an update, or the plan beside the state, does not fit; again when it has become more."""
        tier = plan.machine.compute_tier
        budget_bytes, plan_bytes = plan.budget_bytes[tier], plan.peak_bytes[tier]
        sizes = states.persistent.sizes
        parameters = sum(sizes[name] for name in changed_by(states))
        gradients = sum(sizes[slot.totals[0].name] for slot in states.rules.slots.values())
        state = state_bytes(states.optimizer)
        needed = max(parameters + gradients, plan_bytes) + state + self._transfer_bytes
        if needed <= max(budget_bytes, self._said_bytes):
            return
        self._said_bytes = needed
        kind = type(states.optimizer).__name__
        warnings.warn(
            f"{kind} is not planned: its updates hold parameters of {format_size(parameters)} and gradients of "
            f"{format_size(gradients)} in memory, and its state of {format_size(state)} stays there beside the plan of "
            f"{format_size(plan_bytes)}. With buffers for transfers that takes {format_size(needed)} of a budget of "
            f"{format_size(budget_bytes)}. {SUPPORTED} have planned updates, which keep it",
            stacklevel=4,
        )
