"""Effects: what a program changes while it is captured, and whether any of it counts for what is captured.

Counters, logs that grow and timers do not; inference and training ask here alike. Only what is proven for
every value that may come is let go: a counter that is compared with 100 is not, long before 100 steps.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from torch import fx

from gascompile.capture.record.opaque import UsedError
from gascompile.capture.record.record import CaptureRecord, Recorder
from gascompile.capture.record.same_graph import graph_digest
from gascompile.capture.record.trial import Trial
from gascompile.core.errors import CaptureError, UnsupportedOpError

_log = logging.getLogger("gascompile")
_MOST_ATTEMPTS = 2
"""Libraries that are imported in a first one run in no second."""
_MOST_SUSPECTS = 32
"""With those that take values of others, from where on no more are added, and it is refused: each round of these is two
captures more."""
T = TypeVar("T")
"""What a capture gives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectTrace(Generic[T]):
    """One capture."""

    captured: T
    graph_module: fx.GraphModule
    """What must not differ."""
    recorder: Recorder
    constants: Mapping[str, object] = field(default_factory=dict)
    """Values of the graph's inputs that are no caller's and no model's."""

    def digest(self) -> str:
        """Return a digest of all that is computed, for others to be compared with."""
        return graph_digest(self.graph_module, self.constants)


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectProof(Generic[T]):
    """What trials have shown."""

    trace: EffectTrace[T] | None = None
    """The capture to take; ``None`` where its effects may matter."""
    why: str = ""
    """Why they may, in words."""
    suspects: frozenset[str] = frozenset()
    """What may be whatever it is: what changes, and what takes values of that."""


def prove(
    record: CaptureRecord,
    capture: Callable[[Trial], EffectTrace[T]],
    *,
    before: Sequence[Recorder],
    who: str,
    keeps: bool = False,
) -> EffectProof[T]:
    """Return a capture that leaves everything as it was, if what ``record`` says it changes cannot matter.

    Args:
        record: of a capture that is not reproducible.
        capture: makes another one.
        before: those that were made; what they have changed is undone.
        who: what is captured, for the log.
        keeps: whether tensors that a call keeps for none may be let go: see ``Trial``.

    Raises:
        CaptureError: the program cannot be captured any more.
    """
    if not record.is_open:
        return EffectProof()
    spaces = list({id(space): space for _, space in record.running.code.values()}.values())
    suspects, attempt = record.suspects, 0
    while attempt < _MOST_ATTEMPTS:
        with _collector_at_rest():
            real = Trial(suspects, spaces, is_opaque=False, keeps=keeps)
            trace = capture(real)
            if real.uses.texts:
                return EffectProof(why=real.uses.texts[0])
            digest = trace.digest()
            # Should what the first left behind have been in the way, all of it is collected in another attempt.
            collected = not attempt and suspects == record.suspects
            trial = Trial(suspects, spaces, is_opaque=True, keeps=keeps, collected=collected)
            why = _difference(trial, capture, digest)
            if why is None and trial.leaked():
                why = "it keeps their values where they cannot be followed"
        if not trial.reached <= suspects and len(suspects) < _MOST_SUSPECTS:
            # What takes their values, as the one of the call before, changes as they do.
            suspects |= trial.reached
            continue
        attempt += 1
        if why is not None:
            return EffectProof(why=why)
        if trial.path == real.path:
            break
    else:
        return EffectProof(why="it takes another course where their values are not known")
    for recorder in reversed(before):
        recorder.undo(suspects)
    if record.why is None:
        return EffectProof(trace=trace, suspects=suspects)
    _log.warning(
        "%s: the code that is captured does more than compute (%s); this does not matter for results, and does not "
        "happen in planned runs, which run no Python code",
        who,
        record.why,
    )
    return EffectProof(trace=trace, suspects=suspects)


@contextmanager
def _collector_at_rest() -> Iterator[None]:
    """Leave it to the trials when garbage is collected."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _difference(
    trial: Trial, capture: Callable[[Trial], EffectTrace[T]], digest: str
) -> str | None:
    """Return what an opaque capture looks at."""
    try:
        trace = capture(trial)
        asks = trial.not_followed(trace.recorder.asks)
        same = trace.digest() == digest
    except UsedError:
        return trial.uses.texts[0]
    except (CaptureError, UnsupportedOpError) as error:
        return trial.uses.texts[0] if trial.uses.texts else f"without their values, {error}"
    if trial.uses.texts:
        return trial.uses.texts[0]
    if asks is not None:
        return f"{asks} in a way that cannot be followed; call time.time(), time.perf_counter() or random.random()"
    return None if same else "they are part of what is captured"
