"""Traced loss: a loss over the flat leaves of a batch, as a module that AOTAutograd can trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from gascompile.capture.exact_types import require_no_exact_types
from gascompile.capture.record.given import changed_entries, entries_of
from gascompile.capture.record.record import Recorder
from gascompile.core.errors import CaptureError, UnsupportedOpError
from gascompile.core.signature import same_tensors
from gascompile.training.capture.trace_substitutes import TraceSubstitutes
from gascompile.training.state.aliasing import places
from gascompile.training.state.open_tensors import outline

LossFunction = Callable[[nn.Module, Any], torch.Tensor]
"""A loss over a model and a batch; of a call of the model, what returns all that this does."""
MODEL, OUTSIDE = "model.", "outside_"
"""What names of the model's tensors, and of those from outside, begin with."""


class TracedLoss(nn.Module):
    """A loss over the flat leaves of a batch."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        spec: pytree.TreeSpec,
        given: Sequence[Any],
        substitutes: TraceSubstitutes,
        recorder: Recorder,
        *,
        trains: bool,
        caches: bool,
    ) -> None:
        """Change nothing.

        Args:
            spec: of the batch.
            given: its leaves.
            substitutes: what the loss sees in the place of real tensors.
            recorder: takes note of what the loss reads in Python.
            trains: False for the value alone.
            caches: whether autocast keeps what it casts.
        """
        super().__init__()
        self._caches = caches
        self.with_gradients: set[str] = set()
        """Buffers to which the loss writes values with gradients; there once it has been traced."""
        self._recorder = recorder
        self.model = model
        self._loss_fn, self._spec, self._trains = loss_fn, spec, trains
        self._given, self._places = given, same_tensors(given)
        self._substitutes = substitutes
        self.outside = list(substitutes.outside)
        for number, tensor in enumerate(self.outside):
            self.register_buffer(f"{OUTSIDE}{number}", outline(tensor))

    def computed(self, leaves: Sequence[Any]) -> Any:
        """Return what ``loss_fn`` returns: it gets one tensor where one is given twice, and else what was given."""
        traced = [
            leaves[place] if isinstance(own, torch.Tensor) else own
            for own, place in zip(self._given, self._places, strict=True)
        ]
        batch = pytree.tree_unflatten(traced, self._spec)
        outside = {
            id(real): self.get_buffer(f"{OUTSIDE}{number}")
            for number, real in enumerate(self.outside)
        }
        with self._substitutes.active(outside, caches=self._caches):
            own = [(held, leaf, held[leaf]) for _, (held, leaf) in places(self.model)]
            before = entries_of((batch,), {})
            with self._recorder.running():
                returned = self._loss_fn(self.model, batch)
            self._recorder.changes_containers = changed_entries(before)
            _require_in_place(own)
        for name, buffer in self.named_buffers():
            if buffer.grad_fn is not None:
                # Of what the loss has written there, which else is another thing to begin the backward pass from.
                buffer.detach_()
                self.with_gradients.add(name.removeprefix(MODEL))
        return returned

    def forward(self, *leaves: Any) -> torch.Tensor:
        """Return the loss, as a tensor of its own."""
        loss: Any = self.computed(leaves)
        require_no_exact_types(self._recorder.ran)
        if self._recorder.packed is not None and self._trains:
            raise UnsupportedOpError(
                f"{self._recorder.packed} sets hooks on saved tensors, which a planned step does not call; leave them "
                "out: what has to leave memory does so by plan"
            )
        scalar = isinstance(loss, torch.Tensor) and not loss.dim()
        if not scalar or (self._trains and not loss.is_floating_point()):
            returned = (
                f"{tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            )
            raise CaptureError(
                f"loss_fn returned {returned}; it has to return one floating-point scalar tensor, such as a mean"
            )
        if self._trains and not loss.requires_grad:
            raise CaptureError(
                "the loss does not depend on any parameter that requires a gradient; leave out no_grad() and detach()"
            )
        # A loss that is a view, or a parameter itself, would come out as what it is a view of.
        value: torch.Tensor = loss.clone()
        return value


def _require_in_place(own: list[tuple[dict[str, Any], str, torch.Tensor]]) -> None:
    """Refuse a loss after which a module has another parameter or buffer under a name."""
    for held, leaf, tensor in own:
        if held.get(leaf) is not tensor:
            raise CaptureError(
                f"the model assigns its '{leaf}' anew, which a planned step would not keep; change it in place, as by "
                f"self.{leaf}.copy_(value)"
            )


def apart(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Return a batch's leaves, each a tensor of its own.

    AOTAutograd makes one input of a tensor that comes twice once anything that comes twice is written to, such as a
    buffer of two names.
    """
    seen: set[int] = set()
    made = []
    for leaf in leaves:
        is_again = isinstance(leaf, torch.Tensor) and id(leaf) in seen
        seen.add(id(leaf))
        made.append(leaf.detach().requires_grad_(leaf.requires_grad) if is_again else leaf)
    return tuple(made)
