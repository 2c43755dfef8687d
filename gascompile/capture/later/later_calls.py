"""Later calls: a model is captured for inference only where each later call of eager's would compute the same.

What the capture changes or reads anew is either proven not to matter (``effects``), or the calls settle: those
that come after all that were made before change nothing any more, and compute what the first ones did.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from torch import nn
from torch.export import ExportedProgram

from gascompile.capture.drop_no_ops import drop_no_ops
from gascompile.capture.later.history import OutlinedCall, Past
from gascompile.capture.later.rounds import Rounds
from gascompile.capture.later.same_calls import later_difference
from gascompile.capture.old_hooks import old_hook
from gascompile.capture.record.effects import EffectTrace, prove
from gascompile.capture.record.record import CaptureRecord
from gascompile.capture.record.trial import Trial
from gascompile.capture.to_program import inline_wrappers
from gascompile.core.errors import CaptureError, UnsupportedOpError

Exported = tuple[ExportedProgram, Mapping[str, str], tuple[Any, ...], Mapping[str, Any]]
"""With the first names of tensors, and the inputs of the trace."""


class Exports(Protocol):
    """Makes a trace of one model and one call."""

    def __call__(
        self, trial: Trial | None = None, rounds: Rounds | None = None
    ) -> EffectTrace[Exported]:
        """Trace one call, or two rounds of calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steady:
    """What is proven of a capture."""

    record: CaptureRecord
    trace: EffectTrace[Exported] | None = None
    """The one to take in the place of the first."""
    inert: frozenset[str] = frozenset()
    """What calls change, and does not matter for this one and those before."""
    settles: bool = False
    """Whether later calls find what this one has made."""


def steady_capture(
    trace: EffectTrace[Exported], exports: Exports, others: Sequence[Past], model: nn.Module
) -> Steady:
    """Return what of ``trace`` holds for all calls that follow.

    Args:
        trace: of one call.
        exports: makes others.
        others: the calls of other signatures that have plans.
        model: what was traced.

    Raises:
        CaptureError: a later call may compute something else.
    """
    record = trace.recorder.record(model)
    inert = record.suspects.union(*(past.inert for past in others))
    settled = any(past.settles for past in others)
    if not inert and not settled and not trace.recorder.asks:
        return Steady(record=record)
    trace.recorder.restore()
    record = trace.recorder.record(model)
    who, why = type(model).__name__, ""
    widened, taken = replace(record, suspects=inert), None
    if not settled:
        proof = prove(widened, exports, before=(), who=who)
        taken, why = proof.trace, proof.why
        if taken is not None:
            record, inert = taken.recorder.record(model), proof.suspects
            if all(inert <= past.inert for past in others):
                return Steady(record=record, trace=taken, inert=inert)
    later = _unsettled(taken or trace, exports, [past.call for past in others], who)
    if isinstance(later, str):
        reasons = [part for part in (widened.why, why and f"this counts: {why}", later) if part]
        advice = old_hook(model) or (
            "pass what changes as an input, keep tensors that change in buffers (register_buffer), draw random numbers "
            "by torch.rand, and set what is made once before compiling"
        )
        raise CaptureError(
            f"{who} may compute something else at every call, and a plan computes the same at each: "
            f"{'; '.join(reasons)}. What to do: {advice}"
        )
    settles = taken is None or not inert <= later
    return Steady(record=record, trace=taken, inert=later, settles=settles)


def _unsettled(
    single: EffectTrace[Exported], exports: Exports, earlier: Sequence[OutlinedCall], who: str
) -> str | frozenset[str]:
    """Return why later calls may differ from ``single``, or from their firsts; else what they change all the same."""
    rounds = Rounds(earlier)
    try:
        trace = exports(None, rounds)
        alone, several, canonical = single.captured[0], *trace.captured[:2]
        for exported in (alone, several):
            inline_wrappers(exported.graph_module)
            drop_no_ops(exported.graph_module.graph)
        returned = single.recorder.traced
        assert returned is not None, "a capture follows its call"
        why = later_difference(alone, returned, several, canonical, rounds.calls)
        if why is not None:
            return why
        record = trace.recorder.record()
        if not record.suspects and not trace.recorder.asks:
            return frozenset()
        again = partial(exports, rounds=Rounds(earlier))
        proof = prove(record, again, before=(), who=who, keeps=True)
    except (CaptureError, UnsupportedOpError) as error:
        return f"a later call cannot be captured: {error}"
    if proof.trace is None:
        return f"a later call has still such effects ({record.why}): {proof.why or 'they cannot be followed'}"
    return proof.suspects
