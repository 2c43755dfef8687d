"""Capture record: what a capture depended on beside shapes and weights, and whether that still holds.

Inference and training record alike: a ``Recorder`` is made before a capture, encloses it, is told which
part of it is the program's own code, and gives a ``CaptureRecord``. What a record cannot vouch for, it says.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import wraps
from typing import TYPE_CHECKING, Any

from torch import nn

from gascompile.capture.fingerprint.code_names import codes_in, names_of
from gascompile.capture.fingerprint.code_origin import (
    Origin,
    key_of,
    origin_of_file,
    origin_of_name,
)
from gascompile.capture.record.dependencies import Dependencies, dependencies
from gascompile.capture.record.recorder import Running
from gascompile.capture.record.watched import Change, Reads, Watches
from gascompile.capture.record.watches import Code, watch

if TYPE_CHECKING:
    from gascompile.capture.record.trial import Trial

_EVERYTHING = Reads(names=None, ran=None)
_GENERAL = "torch/nn/modules/module.py"


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
    """Whether ``suspects`` and looks at the clock are all reasons there are."""

    @property
    def is_reproducible(self) -> bool:
        """Whether the same code on the same values would be captured alike."""
        return self.why is None

    inert: frozenset[str] = frozenset()
    """What the capture changes, and is proven not to matter."""

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
        found, reasons = dependencies(self.running, self.reads, self.own, reached)
        found = replace(found, inert=tuple(sorted(self.inert)))
        return found, _joined([*filter(None, [self.why]), *reasons])


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
        self._changed: dict[str, Change] = {}
        self._follows = False
        self._model = model

    @contextmanager
    def around(self) -> Iterator[None]:
        """Enclose the capture."""
        self._before = watch(self._model, self._functions, (), _EVERYTHING, versions=False)
        trial = self._trial.active(self._before) if self._trial else nullcontext()
        with self._running.around(), trial:
            try:
                yield
            finally:
                if not self._follows:
                    self._compare()

    def _compare(self) -> None:
        """Take note of what differs from before."""
        if self._trial is not None and self._trial.is_opaque:
            return
        with self._trial.paused() if self._trial else nullcontext():
            found = self._before.changes(_EVERYTHING)
        self._changed.update({change.name: change for change in found})

    @contextmanager
    def running(self) -> Iterator[None]:
        """Enclose the model's own code; may happen several times, within dispatch modes of torch."""
        with self._running.recorded():
            yield

    def follow(self, module: nn.Module) -> None:
        """Record every call of ``module``, a copy that is made for the capture."""
        inner, self._follows = module.forward, True

        @wraps(inner)
        def forward(*args: Any, **kwargs: Any) -> Any:
            with self.running():
                found = inner(*args, **kwargs)
            # Here, as torch.export lets attributes be as they were before.
            self._compare()
            return found

        # Hooks would not do: torch.export leaves them out when a call fails.
        vars(module)["forward"] = forward

    def record(self, model: nn.Module | None = None) -> CaptureRecord:
        """Return what was recorded.

        Args:
            model: the module whose values count from now on, where a copy of it was traced.
        """
        code = list(self._running.code.values())
        reads = _reads(code, self._model)
        own = [(body, space) for body, space in code if _is_own(body, space)]
        watches = watch(model or self._model, self._functions, own, reads, versions=self._versions)
        changes, asked = self._changes(reads), dict(self._running.asked)
        if self._trial is not None:
            watches = watches.without(self._trial.suspects)
            asked = {text: None for text in asked if text not in self._running.clocks}
        reasons = [f"it changes what it reads: {change.text}" for change in changes]
        others = [text for text in asked if text not in self._running.clocks]
        others += [
            f"it reads {name}, which gives another value each time" for name in watches.moving
        ]
        reasons += [*(text for text in asked if text not in others), *others]
        return CaptureRecord(
            reads,
            watches,
            self._running,
            tuple(own),
            _joined(reasons),
            suspects=frozenset(change.name for change in changes),
            is_open=not others,
            inert=self._trial.suspects if self._trial else frozenset(),
        )

    @property
    def reads_clock(self) -> bool:
        """Whether the capture has looked at the clock."""
        return bool(self._running.clocks)

    def undo(self, names: frozenset[str]) -> None:
        """Let these values be what they were before the capture."""
        from gascompile.capture.record.snapshot import undo

        undo(self._before, names)

    def _changes(self, reads: Reads) -> list[Change]:
        """Return what the capture changed, but for what its trial is about."""
        known = self._trial.suspects if self._trial else ()
        return [
            change
            for change in self._changed.values()
            if reads.reach(change.name, change.key) and change.name not in known
        ]


def watched(model: nn.Module, known: Dependencies) -> Watches:
    """Return the values that a capture of another process read, as they are now."""
    found = watch(model, (), _code_of(known), known.reading(), versions=True)
    return found.without(frozenset(known.inert))


def _code_of(known: Dependencies) -> list[Code]:
    """Return the functions that ran and that are loaded, with their globals."""
    ran, found = set(known.ran), []
    files = {key.rpartition(":")[0] for key in ran}
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)) in files:
            found += [(code, vars(module)) for code in _codes(name, module) if key_of(code) in ran]
    return found


def _codes(name: str, module: types.ModuleType) -> Iterator[types.CodeType]:
    """Yield the code of a module's functions and methods."""
    todo = [value for value in vars(module).values() if getattr(value, "__module__", None) == name]
    for value in todo:
        if isinstance(value, type):
            todo += vars(value).values()
            continue
        inner: Any = (
            value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        )
        code = getattr(inspect.unwrap(inner), "__code__", None)
        if isinstance(code, types.CodeType):
            yield from codes_in(code)


def _joined(reasons: list[str]) -> str | None:
    return "; ".join(list(dict.fromkeys(reasons))[:3]) or None


def _is_own(code: types.CodeType, space: dict[str, Any]) -> bool:
    found = origin_of_file(code.co_filename)
    return not found.versioned and not (
        found is Origin.MADE and origin_of_name(str(space.get("__name__"))).versioned
    )


def _reads(code: list[Code], model: nn.Module) -> Reads:
    """Return the names that count: those in the program's and libraries' code and in that of torch's layers."""
    files = {
        made.__code__.co_filename
        for module in model.modules()
        for base in type(module).__mro__
        if isinstance(made := vars(base).get("__init__"), types.FunctionType)
    }
    names: set[str] = set()
    by_name = False
    for body, _ in code:
        found = origin_of_file(body.co_filename)
        if not found.versioned:
            here = names_of(body)
            names |= here.attributes.union(*here.chains)
            by_name = by_name or here.by_name
        elif _counts(body, found, files):
            names.update(body.co_names)
            names.update(c for c in body.co_consts if isinstance(c, str) and c.isidentifier())
    ran = frozenset(key_of(body) for body, _ in code)
    return Reads(names=None if by_name else frozenset(names), ran=ran)


def _counts(code: types.CodeType, found: Origin, files: set[str]) -> bool:
    """Return whether the names in a library's code say what is read of a module."""
    path = code.co_filename
    return found is Origin.INSTALLED or (path in files and not path.endswith(_GENERAL))
