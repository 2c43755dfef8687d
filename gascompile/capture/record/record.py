"""Capture record: what a capture depended on beside shapes and weights, and whether that still holds.

Inference and training record alike: a ``Recorder`` is made before a capture, encloses it, is told which
part of it is the program's own code, and gives a ``CaptureRecord``. What a record cannot vouch for, it says.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from gascompile.capture.fingerprint.code_origin import (
    Origin,
    origin_of_file,
    origin_of_name,
)
from gascompile.capture.later.rounds import Rounds, TracedCall
from gascompile.capture.record.asked_inputs import AskedInputs
from gascompile.capture.record.call_digest import CallDigest
from gascompile.capture.record.dependencies import Dependencies, dependencies
from gascompile.capture.record.filled_caches import empty_filled_caches
from gascompile.capture.record.given import changed_entries, entries_of
from gascompile.capture.record.kept_memory import memory_kept
from gascompile.capture.record.read_names import is_of_library, reads_of, with_python
from gascompile.capture.record.recorder import Ask, Running
from gascompile.capture.record.size_types import types_of_sizes_noted
from gascompile.capture.record.snapshot import Draws, Snapshot, undo
from gascompile.capture.record.tensor_slots import Slots, changed_slots, tensor_slots
from gascompile.capture.record.watched import Reads, WatchedChange, Watches
from gascompile.capture.record.watches import Code, watch

if TYPE_CHECKING:
    from gascompile.capture.record.trial import Trial

_EVERYTHING = Reads(names=None, ran=None)
_TRIED = {Ask.CLOCK, Ask.DRAW}  # what a trial stands in for


@dataclass(frozen=True, slots=True)
class CaptureRecord:
    """What a capture read. Its values are compared with those of today by ``changed``."""

    reads: Reads
    watches: Watches
    running: Running
    own: tuple[Code, ...]
    why: str | None = None
    """Why another capture may differ although nothing changed, as with random numbers of Python's."""
    suspects: frozenset[str] = frozenset()
    """What the capture itself changed; a reason only if it matters, which a trial shows."""
    is_open: bool = False
    """Whether a trial can show that no reason matters which another call of this process has."""
    elsewhere: str | None = None
    """Why a capture of another process, or after a change of the disk, may differ."""

    @property
    def is_reproducible(self) -> bool:
        """Whether the same code on the same values would be captured alike."""
        return self.why is None

    inert: frozenset[str] = frozenset()
    """What the capture changes, and is proven not to matter."""
    inputs: AskedInputs | None = None
    """What was asked of the call's."""

    def changed(self) -> str | None:
        """Return which value is another than it was when captured, in words, or ``None``.

        Takes microseconds: scalars, functions and containers that the captured code read are compared by
        identity first.
        """
        return self.watches.changed()

    def kept(self, reached: frozenset[str]) -> tuple[Dependencies, str | None]:
        """Return what to compare before the plan is used again, and why that would not do.

        Args:
            reached: what the model's digest covers.
        """
        known, reasons = dependencies(self.running, self.reads, self.own, reached)
        known = replace(known, inert=tuple(sorted(self.inert)))
        if self.inputs is not None and self.inputs.facts:
            reasons = [*reasons, "it asks for more of its inputs than their shapes"]
        return known, _joined([*filter(None, [self.why]), *reasons])


Recorded = CaptureRecord | Dependencies
"""What a capture read, or, of a kept one, what it depends on."""


class Recorder:
    """Records one capture: ``around`` encloses it, ``running`` the model's own code in it."""

    def __init__(
        self,
        model: nn.Module,
        *functions: Callable[..., Any],
        versions: bool = False,
        trial: Trial | None = None,
    ) -> None:
        """Take note of the values before the capture.

        Args:
            model: what is traced, which may be a copy.
            functions: what else is called, as a loss.
            versions: whether plain tensors that are read are baked in; steps of training read them anew.
            trial: what to find out by this capture, which then leaves everything as it was.
        """
        self._functions, self._versions, self._trial = functions, versions, trial
        self._running = Running()
        self._before = Watches(versions=False)
        self._snapshot: Snapshot | None = None
        self._rounds: Rounds | None = None
        self._slots: Slots = {}
        self._draws = Draws()
        self.traced: TracedCall | None = None
        """What a single call returned that is followed."""
        self.changes_containers = False
        """Whether a single call changed a list or dict that it was given."""
        self._changed: dict[str, WatchedChange] = {}
        self._follows, self._model = False, model

    @contextmanager
    def around(self) -> Iterator[None]:
        """Enclose the capture."""
        self._before = self._everything()
        self._snapshot, self._draws = Snapshot(self._before), Draws()
        try:
            with self._running.around(), self._tried(at_once=self._rounds is None):
                try:
                    yield
                finally:
                    if not self._follows:
                        self._compare()
        except BaseException:
            # Else tensors of the trace would stay where the program keeps what it computes once.
            self.restore()
            raise
        finally:
            empty_filled_caches(self.ran, self._model)
            if self._rounds is not None:
                self.restore()
            elif self._trial is not None:
                self._draws.restore()

    def _everything(self) -> Watches:
        return watch(self._model, self._functions, (), _EVERYTHING, versions=False)

    def _tried(self, *, at_once: bool) -> AbstractContextManager[None]:
        return self._trial.active(self._before) if self._trial and at_once else nullcontext()

    def _compare(self) -> None:
        """Take note of what differs from before."""
        with self._trial.paused() if self._trial else nullcontext():
            if self._trial is not None:
                self._trial.look_after(self._everything)
                if self._trial.is_opaque:
                    return
            changes = self._before.changes(_EVERYTHING)
            if self._follows:
                changes += changed_slots(self._slots, tensor_slots(self._model))
        self._changed.update({change.name: change for change in changes})

    def noting_sizes(self) -> AbstractContextManager[None]:
        """Enclose a capture for ranges of sizes: see ``words_of_sizes``."""
        return types_of_sizes_noted(self._running)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Enclose the model's own code; may happen several times, within dispatch modes of torch."""
        with memory_kept(self._model), self._running.recorded():
            yield

    def follow(
        self, module: nn.Module, rounds: Rounds | None = None, inputs: AskedInputs | None = None
    ) -> None:
        """Record every call of ``module``, a copy that is made for the capture.

        Args:
            module: with its hooks.
            rounds: what to call it with instead; then changes are those of the last round.
            inputs: of the call.
        """
        self._follows, self._rounds, self._running.inputs = True, rounds, inputs
        self._running.digest = digest = CallDigest() if rounds is None else None

        def inner(*args: Any, **kwargs: Any) -> Any:
            if inputs is not None:
                inputs.follow(module, args, kwargs)
            if digest is not None:
                digest.begin(module, args, kwargs)
            with self.running():
                returned = module._call_impl(*args, **kwargs)
            if digest is not None:
                digest.end(returned)
            return returned

        def called(*args: Any, **kwargs: Any) -> Any:
            if rounds is not None:
                return rounds.run(inner, (args, kwargs), self._last_round)
            self._slots, before = tensor_slots(self._model), entries_of(args, kwargs)
            returned = inner(*args, **kwargs)
            self.traced = TracedCall.of(returned, 0)
            self.changes_containers = changed_entries(before)
            # Here, as torch.export lets attributes be as they were before.
            self._compare()
            return returned

        # torch.nn.Module calls this with its hooks not yet run.
        vars(module)["_compiled_call_impl"] = called

    @contextmanager
    def _last_round(self) -> Iterator[None]:
        self._before, self._slots = self._everything(), tensor_slots(self._model)
        with self._tried(at_once=True):
            yield
            self._compare()

    def record(self, model: nn.Module | None = None) -> CaptureRecord:
        """Return what was recorded.

        Args:
            model: the module whose values count from now on, where a copy of it was traced.
        """
        code = list(self._running.code.values())
        reads = reads_of(code, self._model)
        own = [(body, space) for body, space in code if is_own(body, space)]
        libraries = [row for row in code if is_of_library(row[0])]
        watches = watch(
            model or self._model,
            self._functions,
            own,
            reads,
            versions=self._versions,
            libraries=libraries,
            steady=self._running.first_seen.is_steady,
        )
        watches.variables(self._running.environment)
        watches.files(self._running.files)
        watches.settings(self._running.settings)
        asked_inputs = self._running.inputs
        for (path, name), tensor in (asked_inputs.own_facts if asked_inputs else {}).items():
            watches.attribute(tensor, name, f"{name} of {path}")
        changes, asked = self._changes(with_python(reads, code)), dict(self._running.asked)
        moving = dict.fromkeys(watches.moving)
        if self._trial is not None:
            watches = watches.without(self._trial.suspects)
            asked = {text: kind for text, kind in asked.items() if kind not in _TRIED}
            moving = {name: None for name in moving if name not in self._trial.suspects}
        reasons = [f"it changes what it reads: {change.text}" for change in changes]
        reasons += [f"it reads {name}, which gives another value each time" for name in moving]
        reasons += sorted(asked, key=lambda text: asked[text] is Ask.ELSEWHERE)
        return CaptureRecord(
            reads,
            watches,
            self._running,
            tuple(own),
            _joined(reasons),
            suspects=frozenset((*(change.name for change in changes), *moving)),
            is_open=Ask.ANEW not in asked.values(),
            elsewhere=_joined([text for text in asked if asked[text] is Ask.ELSEWHERE]),
            inert=self._trial.suspects if self._trial else frozenset(),
            inputs=self._running.inputs,
        )

    @property
    def ran(self) -> list[Code]:
        """The code of all functions that ran, the program's own and torch's, each with its globals."""
        return list(self._running.code.values())

    @property
    def packed(self) -> str | None:
        """What of the program set hooks on saved tensors, if something did."""
        return next(iter(self._running.packed), None)

    @property
    def calls_back(self) -> bool:
        """Whether a backward pass would run Python code, as hooks."""
        return self._running.calls_back

    @property
    def settings(self) -> dict[str, object]:
        """Which of torch's settings the program has asked for, with what it was told."""
        return self._running.settings

    @property
    def words_of_sizes(self) -> str | None:
        """What of the program asked for the text or the type of a size, if something did."""
        for body, space in self._running.code.values():
            if {"type", "int"} <= {*body.co_names} and is_own(body, space):
                return f"{body.co_qualname} may ask whether the type of a size is int"
        return next(iter(self._running.sizes), None)

    @property
    def nests(self) -> bool:
        """Whether eager would take what is padded out of batches, which no capture can follow."""
        return self._running.nests

    @property
    def asks_past(self) -> bool:
        """Whether the program asks for gradients in a way in which it cannot be told another answer."""
        return self._running.asks_past

    @property
    def calls(self) -> str | None:
        """A digest of what a single call that was followed had torch compute; ``None`` where nobody can say."""
        return self._running.digest.value if self._running.digest is not None else None

    @property
    def asks(self) -> list[str]:
        """What the capture has asked for that may be another at the next call, in words."""
        asked = self._running.asked
        return [text for text in asked if asked[text] is not Ask.ELSEWHERE]

    def restore(self) -> None:
        """Let everything that the capture could change be what it was before."""
        if self._snapshot is not None:
            self._snapshot.restore()
            self._draws.restore()

    def undo(self, names: frozenset[str]) -> None:
        """Let these values be what they were before the capture."""
        undo(self._before, names)

    def _changes(self, reads: Reads) -> list[WatchedChange]:
        """Return what the capture changed, but for what its trial is about."""
        known = self._trial.suspects if self._trial else ()
        return [
            change
            for change in self._changed.values()
            if reads.reach(change.name, change.key) and change.name not in known
        ]


def _joined(reasons: list[str]) -> str | None:
    return "; ".join(list(dict.fromkeys(reasons))[:3]) or None


def is_own(code: types.CodeType, space: dict[str, Any]) -> bool:
    """Return whether code is the program's, which may change what it reads: a library's is known by its version."""
    origin = origin_of_file(code.co_filename)
    return not origin.versioned and not (
        origin is Origin.MADE and origin_of_name(_maker(code, str(space.get("__name__")))).versioned
    )


def _maker(code: types.CodeType, space_name: str) -> str:
    """Return the module that code without a file is of: the constructor of a named tuple is its class's."""
    typename = space_name.removeprefix("namedtuple_")
    if typename != space_name:
        for module in list(sys.modules.values()):
            made = vars(module).get(typename)
            if isinstance(made, type) and getattr(made.__new__, "__code__", None) is code:
                return made.__module__
    return space_name
