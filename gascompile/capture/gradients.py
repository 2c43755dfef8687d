"""Gradients: a model that asks whether they are recorded is planned only if the answer decides nothing.

No planned run records any. First the model runs once more on fake tensors, told the other answer, and what it has
torch compute is compared; only where that does not show it to be the same, a second graph is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from gascompile.capture.exporting import exporting
from gascompile.capture.fake_twin import fake_twin
from gascompile.capture.later.later_calls import Exported, Steady
from gascompile.capture.record.asked_inputs import AskedInputs
from gascompile.capture.record.asked_settings import GRADIENTS, as_if_recording
from gascompile.capture.record.callers import caller_of
from gascompile.capture.record.effects import EffectTrace
from gascompile.capture.record.record import CaptureRecord, Recorder
from gascompile.capture.trace_inputs import trace_inputs
from gascompile.capture.tracing import tracing
from gascompile.core.errors import CaptureError

Spaces = Sequence[dict[str, Any]]
"""Globals of code that is told that gradients are recorded."""


@dataclass(frozen=True, slots=True)
class GradientCall:
    """A model and one call of it."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    device: str
    overlapping: bool


def computes_alike(call: GradientCall, record: CaptureRecord, calls: str | None) -> bool:
    """Return whether a call computes the same where it is told that gradients are recorded; False if not known.

    Args:
        call: holds for its shapes alone.
        record: of its capture.
        calls: digest of what it had torch compute there.
    """
    if calls is None:
        return False
    try:
        return _calls_when_told(call, _spaces(record)) == calls
    except Exception:  # noqa: BLE001 - whatever the model's own code raises where it cannot run so
        return False


def told(spaces: Spaces | None) -> Any:
    """Return a context in which the model's code is told that gradients are recorded, if there are ``spaces``."""
    return as_if_recording(spaces, caller_of) if spaces is not None else nullcontext()


def without_gradients(
    steady: Steady, exports: Callable[..., EffectTrace[Exported]] | None, digest: str, who: str
) -> Steady:
    """Return what is proven if the model computes the same whether gradients are recorded, which no run does.

    Args:
        steady: what is proven of the capture.
        exports: makes another with the other answer; ``None`` where it is known to be the same.
        digest: of the first one.
        who: name of the model.

    Raises:
        CaptureError: it computes something else.
    """
    record = steady.record
    if exports is not None:
        other = exports(spaces=_spaces(record))
        other.recorder.restore()
        if other.recorder.asks_past:
            raise CaptureError(
                f"{who} asks whether gradients are recorded by a name for {GRADIENTS} that is no global of its code, "
                "where a capture cannot tell it another answer. What to do: ask by torch.is_grad_enabled(), or compile "
                "and call it under torch.no_grad()"
            )
        if other.digest() != digest:
            raise CaptureError(
                f"{who} computes something else where gradients are recorded, which it asks for ({GRADIENTS}, or "
                "requires_grad, grad_fn or is_leaf of a value), and a plan computes without. What to do: compile and "
                "call it under torch.no_grad(), or train it with gascompile.compile_step"
            )
    record.running.settings.pop(GRADIENTS, None)
    return replace(
        steady, record=replace(record, watches=record.watches.without(frozenset({GRADIENTS})))
    )


def _spaces(record: CaptureRecord) -> Spaces:
    return list({id(space): space for _, space in record.running.code.values()}.values())


def _calls_when_told(call: GradientCall, spaces: Spaces) -> str | None:
    """Return the digest of what the call has torch compute where it is told that gradients are recorded."""
    twin, _ = fake_twin(call.model, device=call.device)
    tensors = [*twin.parameters(), *twin.buffers()]
    modes = [tensor.fake_mode for tensor in tensors if isinstance(tensor, FakeTensor)]
    mode = modes[0] if modes else FakeTensorMode(allow_non_fake_inputs=True)
    given = trace_inputs(call.args, call.kwargs, device=call.device, overlapping=call.overlapping)
    args, kwargs = pytree.tree_map_only(torch.Tensor, mode.from_tensor, given)
    recorder = Recorder(twin, versions=True)
    recorder.follow(twin, None, AskedInputs(call.args, call.kwargs, call.model, is_recording=True))
    try:
        with recorder.around(), tracing(), told(spaces), exporting(), mode:
            twin(*args, **kwargs)
        return None if recorder.asks_past else recorder.calls
    finally:
        recorder.restore()
