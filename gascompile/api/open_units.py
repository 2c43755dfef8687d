"""The plans that hold memory: one at a time, or several that share an arena."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gascompile.api.moved_states import open_session
from gascompile.api.unit import Unit
from gascompile.bundles.bundle import Bundle
from gascompile.bundles.files import Weights
from gascompile.codegen.allocator_library import allocation_counter
from gascompile.core.progress import LoadingBar
from gascompile.core.sources import FileStamp
from gascompile.runtime.collectives.local_ranks import LocalRanks
from gascompile.runtime.memory.lasting_accounts import moves_lasting
from gascompile.runtime.run.executor import Executor
from gascompile.runtime.run.session import Session


class OpenUnits:
    """The session of the plan in use, and the executors of all plans that share its arena."""

    def __init__(
        self, cache_dir: Path, *, on_exceed: str, from_file: bool, ranks: LocalRanks | None = None
    ) -> None:
        self._cache_dir, self._on_exceed, self._from_file = cache_dir, on_exceed, from_file
        self._ranks = ranks
        self.session: Session | None = None
        self.executor: Executor | None = None
        self.units: tuple[Unit, ...] = ()
        self._executors: dict[int, Executor] = {}
        self._bar: LoadingBar | None = None

    def has(self, unit: Unit) -> bool:
        """Return whether ``unit`` can run in the session that is open; a child of a fork opens its own."""
        return unit in self.units and self.session is not None and self.session.is_open

    def use(self, unit: Unit) -> Executor:
        """Return what runs ``unit``, whose session is open."""
        if self._bar is not None:
            self._bar.show()
        number = self.units.index(unit)
        if number not in self._executors:
            self._executors[number] = self._made(unit)
        self.executor = self._executors[number]
        return self.executor

    def begin(self, unit: Unit) -> None:
        """Open a session for ``unit`` and all that share its arena, where none is open; their weights begin to load.

        What shows how far they are comes with the first ``use``: other bars may be shown until then.
        """
        units = unit.beside or (unit,)
        early, unit.early = unit.early, None
        self._bar = LoadingBar("Loading resident weights", waits=True)
        bundle = _of_all(units)
        self.session = open_session(
            bundle, self._cache_dir, early=early, progress=self._bar, ranks=self._ranks
        )
        self.units = units

    def open(self, unit: Unit) -> Executor:
        """Open a session as ``begin`` does, and return what runs ``unit``."""
        self.begin(unit)
        return self.use(unit)

    def _made(self, unit: Unit) -> Executor:
        assert self.session is not None, "it is opened first"
        return Executor(
            self.session,
            unit.graph_module,
            unit.bundle.plan,
            fused=unit.fusion.segments if unit.fusion is not None else (),
            graphs=unit.graphs == "auto" and not moves_lasting(unit.bundle.plan),
            counter=allocation_counter(self._cache_dir),
            on_exceed=self._on_exceed,
            from_file=self._from_file,
            onednn=unit.bundle.fusion is not None and unit.bundle.fusion.onednn,
        )

    def close(self) -> None:
        """Free the arena and close the weight files."""
        self.executor = None
        self._executors.clear()
        if self.session is not None:
            self.session.close()
            self.session = None
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        self.units = ()


def _of_all(units: tuple[Unit, ...]) -> Bundle:
    """Return the plan of the first, with the weights and states of all."""
    bundles = [unit.bundle for unit in units]
    if len(bundles) == 1:
        return bundles[0]
    stamps: dict[str, FileStamp] = {s.path: s for of in bundles for s in of.weights.stamps}
    sources = {name: source for of in bundles for name, source in of.weights.sources.items()}
    held = {name: tensor for of in bundles for name, tensor in of.held.items()}
    weights = Weights(sources=sources, stamps=tuple(stamps.values()))
    return replace(bundles[0], weights=weights, held=held)
