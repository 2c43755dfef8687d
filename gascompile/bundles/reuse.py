"""Reuse: whether a cached plan is what a capture of today would give, and what to log where that is unknown.

A plan is kept with the ``Dependencies`` of its capture. It is used again only where the digests in its
folder's name and all dependencies are as they were; what cannot be compared is captured again.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gascompile.bundles import plan_cache
from gascompile.bundles.bundle import Bundle
from gascompile.bundles.kept_captures import (
    KeptCapture,
    captures_dir,
    read_capture,
    write_capture,
)
from gascompile.capture.fingerprint.fingerprint import ModulePrint
from gascompile.capture.record.dependencies import Dependencies
from gascompile.capture.record.kept_watches import unseen, watched
from gascompile.capture.record.record import CaptureRecord, Recorded
from gascompile.capture.record.watched import Watches
from gascompile.core import serial
from gascompile.core.errors import FormatError, StorageError

_log = logging.getLogger("gascompile")
_FILE = "dependencies.json"
_PRINTS = "prints.json"
"""The key by its parts and, by the empty name, the model's class: for a message alone."""


@dataclass(frozen=True, slots=True)
class Basis:
    """What a plan in use rests on."""

    watches: Watches
    known: Dependencies | None
    """What is kept beside the plan; ``None`` where it is not kept."""

    def changed(self) -> str | None:
        """Return which Python value that is part of the plan is another one now, in words, or ``None``."""
        return self.watches.changed()

    def rewrite(self, cache_dir: Path, bundle: Bundle) -> Basis:
        """Keep another plan of the same capture in the place of the one that is kept."""
        if self.known is not None:
            folder = plan_cache.folder_of(cache_dir, bundle.plan.fingerprint)
            _write(folder, bundle, self.known, damaged=True)
        return self


@dataclass(slots=True)
class CachedPlan:
    """The place of one plan in the cache."""

    cache_dir: Path
    model: nn.Module
    printed: ModulePrint
    prints: Mapping[str, str]
    functions: tuple[Callable[..., Any], ...] = ()
    """Of a step, which reads tensors anew each time: its loss, and what the program made its batches of."""
    traced: str = ""
    """The digest of what a capture is made of, whatever is planned of it; empty where none is kept."""
    known: Dependencies | None = None
    is_there: bool = False
    _dependencies: tuple[CaptureRecord, Dependencies, str | None] | None = None
    _seen: Basis | None = None
    """What a kept capture rests on, as it was when that was read."""

    @property
    def folder(self) -> Path:
        """Return where the plan lies."""
        return plan_cache.folder_of(self.cache_dir, self.prints)

    def read(self, outdated: Callable[[Bundle], str]) -> Bundle | None:
        """Return the plan, if it is there and holds; says in the log why one that is there does not.

        Args:
            outdated: says what else makes a plan old.
        """
        if self.printed.opaque:
            return None
        cached = plan_cache.read(self.folder, self.prints)
        if cached is None:
            self._say_what_is_new()
            return None
        self.is_there, self.known = True, read_known(self.folder)
        broken = self.broken(self.known) if self.known else "what it depends on is not known"
        reason = broken or outdated(cached)
        if reason:
            _log.info("the cached plan %s is made again: %s", self.folder, reason)
            return None
        return cached

    @property
    def inert(self) -> frozenset[str]:
        """Return what the captured code changes, and is proven not to matter."""
        return frozenset(self.known.inert) if self.known is not None else frozenset()

    def _say_what_is_new(self) -> None:
        """Log which parts of the key differ from those of the plan of such a model that comes closest."""
        others: list[list[str]] = []
        for path in plan_cache.plans_dir(self.cache_dir).glob(f"[0-9a-f]*/{_PRINTS}"):
            with contextlib.suppress(FormatError, StorageError, AttributeError):
                data = serial.read_json(path)
                if data.get("") == type(self.model).__name__:
                    others.append([k for k, v in self.prints.items() if data.get(k) != v])
        if others:
            fewest = min(others, key=len)
            new = ", ".join(fewest)
            _log.info("%s is planned: the kept plan had other %s", type(self.model).__name__, new)

    def broken(self, known: Dependencies) -> str | None:
        """Return why what is kept does not hold here, or ``None``."""
        if broken := known.broken():
            return broken
        key = unseen(self.model, known, self.functions)
        return None if key is None else f"{key}, which ran, is not found in this process"

    def basis(self) -> Basis:
        """Return what a plan that was read rests on."""
        assert self.known is not None
        is_step = bool(self.functions)
        return Basis(
            watched(self.model, self.known, self.functions, versions=not is_step), self.known
        )

    def refuse(self, error: Exception) -> None:
        """Say that the plan cannot be used after all."""
        _log.warning("the cached plan %s is refused (%s); planning again", self.folder, error)

    def captured(self) -> KeptCapture | None:
        """Return the capture that is kept of what is planned, where it holds, and note what it depends on."""
        if not self.traced or self.printed.opaque:
            return None
        kept = read_capture(self._trace)
        if kept is None:
            return None
        if broken := self.broken(kept.known):
            _log.info("the kept capture %s is made again: %s", self._trace, broken)
            return None
        _log.info("%s is not captured again, but planned", type(self.model).__name__)
        self.known = kept.known
        self._seen = self.basis()
        return kept

    def keep_capture(
        self,
        trace: Mapping[str, Any],
        held: Mapping[str, torch.Tensor],
        record: CaptureRecord,
        facts: Mapping[str, Any] | None = None,
        why_not: str | None = None,
    ) -> None:
        """Keep the ``trace_data`` of a new capture for other plans, unless another one may give another program."""
        known, why = self._kept(record)
        if self.traced and not (why or why_not):
            write_capture(self._trace, trace, held, known, facts or {})

    @property
    def _trace(self) -> Path:
        return captures_dir(self.folder.parent.parent) / self.traced

    def _kept(self, record: CaptureRecord) -> tuple[Dependencies, str | None]:
        """Return what a capture depends on, and why it may not be used again."""
        if self._dependencies is None or self._dependencies[0] is not record:
            known, why = record.kept(self.printed.reached)
            if self.printed.opaque:
                why = f"{self.printed.opaque[0]}, which cannot be compared"
            self._dependencies = record, known, why
        return self._dependencies[1:]

    def keep(
        self,
        bundle: Bundle,
        record: Recorded | None,
        why_not: str | None = None,
    ) -> Basis | None:
        """Write a new plan, unless another capture may give another one; return what it rests on.

        Args:
            bundle: with the plan.
            record: of its capture; of a kept one, what that depends on.
            why_not: a reason against it beside those of ``record``.
        """
        if record is None:
            return None
        if isinstance(record, Dependencies):
            self.known = record
            seen = self._seen or self.basis()
            if why_not is not None:
                return Basis(seen.watches, None)
            self._write(bundle, record)
            return seen
        known, why = self._kept(record)
        why = why or why_not
        if why is not None:
            name = type(self.model).__name__
            _log.warning(
                "the plan of %s is not kept, it is captured again each time: %s", name, why
            )
            return Basis(record.watches, None)
        self._write(bundle, known)
        return Basis(record.watches, known)

    def _write(self, bundle: Bundle, known: Dependencies) -> None:
        _write(self.folder, bundle, known, damaged=self.is_there)
        prints = {"": type(self.model).__name__, **self.prints}
        with contextlib.suppress(StorageError, OSError):
            serial.write_atomic(self.folder / _PRINTS, serial.dumps(prints))


def _write(folder: Path, bundle: Bundle, known: Dependencies, *, damaged: bool) -> None:
    """Write a plan and what it depends on; half of that is as good as nothing."""
    plan_cache.write(folder, bundle, damaged=damaged)
    try:
        write_known(folder, known)
    except (StorageError, OSError) as error:
        _log.warning("what the plan depends on is not kept: %s", error)


def write_known(folder: Path, known: Dependencies) -> None:
    """Write what a plan depends on beside it; raises ``StorageError`` or ``OSError``."""
    serial.write_atomic(folder / _FILE, serial.dumps(known))


def read_known(folder: Path) -> Dependencies | None:
    """Return what a plan depends on, if that is there."""
    try:
        return serial.load(Dependencies, folder / _FILE)
    except (FormatError, StorageError):
        return None
