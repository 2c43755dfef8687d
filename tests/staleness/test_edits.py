"""Edits to the code and data behind a model: a kept plan is used again only where eager gives the same.

``GASCOMPILE_EDITS_STEP=1`` tries every combination; without it a sample is tried. Each edit is a package on disk
that is imported anew before and after it, as by two processes that share a cache.
"""

from __future__ import annotations

import importlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gascompile.capture.export import capture
from gascompile.capture.fingerprint.fingerprint import module_print
from gascompile.capture.fingerprint.replaced import replaced_functions
from gascompile.capture.record.dependencies import Dependencies
from gascompile.capture.record.record import CaptureRecord
from gascompile.core.errors import CaptureError
from tests.packages import fresh
from tests.staleness.code import EDITS, CodeEdit
from tests.staleness.values import KINDS, WAYS, Kind, Way, sources

STEP = int(os.environ.get("GASCOMPILE_EDITS_STEP", "89"))
"""Every how manyth edit is tried."""


@dataclass(frozen=True)
class Kept:
    """What a cache would hold."""

    key: str
    known: Dependencies | None
    why: str | None


def eager(model: nn.Module, x: torch.Tensor) -> list[object]:
    with torch.no_grad():
        found = model(x)
    return [found.dtype, found.tolist()]


def kept(model: nn.Module, x: torch.Tensor) -> Kept:
    """Capture as the pipeline does."""
    printed = module_print(model)
    record = capture(model, (), {"x": x}).record
    assert isinstance(record, CaptureRecord)
    known, why = record.kept(printed.reached)
    return Kept(printed.key, known, "; ".join(printed.opaque) or why)


def reason_to_capture(model: nn.Module, of: Kept) -> str | None:
    """Return why the plan is not used again, as the pipeline decides it."""
    assert of.known is not None
    if of.why is not None:
        return of.why
    if module_print(model).key != of.key:
        return "another fingerprint"
    return of.known.broken()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "pkg"]:
        del sys.modules[name]


@contextmanager
def made(folder: Path, texts: dict[str, str]) -> Iterator[tuple[nn.Module, torch.Tensor]]:
    """Give the model and its input as a new process would make them."""
    main = fresh(folder, texts)
    try:
        yield main.make()
    finally:
        getattr(main, "undo", lambda: None)()


def is_stale(folder: Path, before: dict[str, str], after: dict[str, str]) -> tuple[bool, str]:
    """Return whether the plan of before would run after the edit, and why not where nothing was edited."""
    results = []
    for texts in (before, after):
        with made(folder, texts) as (model, x):
            results.append(eager(model, x))
    assert results[0] != results[1], "the edit changes nothing"
    with made(folder, before) as (model, x):
        try:
            of = kept(model, x)
        except CaptureError:
            return False, "no plan at all"
    reasons = []
    for texts in (before, after):
        with made(folder, texts) as (model, _):
            reasons.append(reason_to_capture(model, of))
    return reasons[1] is None, reasons[0] or ""


VALUES = [(kind, way) for kind, way in itertools.product(KINDS, WAYS)]


@pytest.mark.parametrize(("kind", "way"), VALUES[::STEP], ids=lambda part: part.name)
def test_edited_value(kind: Kind, way: Way, folder: Path) -> None:
    before, after = (sources(kind, way, after=edited) for edited in (False, True))
    stale, again = is_stale(folder, before, after)
    _report(f"{kind.name} by {way.name}", again)
    assert not stale


@pytest.mark.parametrize("edit", EDITS[:: min(STEP, 6)], ids=lambda edit: edit.name)
def test_edited_code(edit: CodeEdit, folder: Path) -> None:
    stale, again = is_stale(folder, edit.sources(after=False), edit.sources(after=True))
    _report(edit.name, again)
    assert not stale


def _report(name: str, again: str) -> None:
    """Say, for ``pytest -rP``, what is captured again although nothing was edited."""
    if again:
        sys.stdout.write(f"AGAIN {name}: {again}\n")


class Applies(nn.Module):
    """Holds what a library gave it."""

    def __init__(self, held: object) -> None:
        super().__init__()
        self.held = held


def of_library(body: str) -> object:
    """Return a lambda as torch itself could have made it."""
    return eval(compile(f"lambda x: {body}", torch.__file__, "eval"), {"__name__": "torch"})


def class_of_library(factor: int) -> type:
    """Return a class as a factory of torch could have made it."""
    return type("Made", (), {"__module__": "torch", "factor": factor, "act": of_library("x")})


def test_lambdas_and_made_classes_of_libraries_differ_by_what_they_do() -> None:
    """They share a name, and a version."""
    prints = [
        module_print(Applies(held))
        for held in (
            of_library("x + 1"),
            of_library("x + 2"),
            of_library("x.to(torch.int8)"),
            class_of_library(1),
            class_of_library(2),
        )
    ]
    assert len(set(prints)) == len(prints)
    assert module_print(Applies(of_library("x + 1"))) == prints[0]
    assert module_print(Applies(class_of_library(1))) == prints[3]


class _Ratio:
    __slots__ = ("above", "below")
    below: int


class _One(_Ratio):
    """As sympy's one: its class says what the slots of its base would, which are empty."""

    __slots__ = ()
    above = 1


def test_slots_that_a_class_below_hides() -> None:
    one, half, third = _One(), _One(), _One()
    for value, below in ((half, 2), (third, 3)):
        setattr(value, "below", below)  # noqa: B010 - a slot that mypy does not know
    prints = [module_print(Applies(value)).digest for value in (one, half, third)]
    assert len({*prints}) == 3


def test_what_a_library_makes_of_its_own_functions_is_no_programs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Decorators of hypothesis make functions of text; what a program puts in their place is still seen."""
    model = nn.Linear(2, 2)
    strategies = importlib.import_module("hypothesis.strategies")
    made = vars(strategies)["slices"]
    assert made.__code__.co_filename == "<string>", "or this shows nothing"
    before = [place for place, _ in replaced_functions()]  # of what else this process has loaded
    assert not [place for place in before if place.startswith("hypothesis.")]
    key = module_print(model).key
    space: dict[str, Callable[..., Any]] = {}
    exec("def around(f):\n    def relu(x):\n        return f(x)\n    return relu", space)
    for inner in (lambda x: 3 * x, nn.functional.gelu):
        monkeypatch.setattr(nn.functional, "relu", space["around"](inner))
        now = [place for place, _ in replaced_functions()]
        assert sorted(set(now) - set(before)) == ["torch.nn.functional.relu"]
        assert module_print(model).key != key


def test_what_was_a_librarys_is_looked_at_again_when_it_is_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In its place among a module's globals, or in the function itself; and when it is put back."""
    before = [place for place, _ in replaced_functions()]

    def other(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
        return 3 * x

    def changed() -> set[str]:
        return {place for place, _ in replaced_functions()} - set(before)

    with monkeypatch.context() as patch:
        patch.setattr(nn.functional, "softsign", other)
        assert changed() == {"torch.nn.functional.softsign"}
        patch.setattr(nn.functional, "softsign", lambda x: x)
        assert changed() == {"torch.nn.functional.softsign"}
    assert changed() == set()
    with monkeypatch.context() as patch:
        patch.setattr(nn.functional.tanhshrink, "__code__", other.__code__)
        assert "torch.nn.functional.tanhshrink" in changed()
    assert changed() == set()
