"""Numbers, words and flags of an installed library that are set while a plan is in use, or between two processes."""

from __future__ import annotations

import contextvars
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import gascompile
from gascompile.capture.record.library_values import plain_places

_SOURCE = """
import contextvars
import types

import torch
from torch import nn

SCALE = 1.0
FLAG = False
WORD = "same"
PAIR = (1, 2.0)
NESTED = {"inner": {"by": 1.0}}
SPACE = types.SimpleNamespace(by=1.0)
CHOSEN = contextvars.ContextVar("chosen", default=1.0)
TABLE = {"by": 1.0, "less": 2.0}
KINDS = {}
LIST = [1.0]
SET = {"scaled"}
EMPTY = {}
SEEN = []


class Registry:
    active = "one"
    _known = {"one": 1.0, "two": 2.0}

    @classmethod
    def chosen(cls):
        return cls._known[cls.active]


class Settings:
    def __init__(self):
        self.offset = 0.0
        self.unread = 0


settings = Settings()
OFFSET = 0.0


class Counted:
    number = 0
    words = {}


def count(x):
    global COUNT, WARNED
    COUNT += 1
    WARNED = True
    Counted.number += 1
    Counted.words["rows"] = len(x)
    MEMO[len(x)] = COUNT
    SEEN.append(COUNT)


COUNT = 0
WARNED = False
MEMO = {}


def shifted(x):
    from some_library import OFFSET as offset

    x = x + offset
    x = x * SCALE * TABLE["by"] * PAIR[1] * Registry.chosen() + settings.offset
    x = x * LIST[-1] * EMPTY.get("by", 1.0) * (2.0 if "scaled" in SET else 1.0)
    x = x * NESTED["inner"]["by"] * SPACE.by * CHOSEN.get()
    if FLAG:
        x = -x
    if WORD != "same":
        x = x + 1
    KINDS[type(x)] = len(KINDS)
    count(x)
    return x


class Layer(nn.Module):
    factor = 3.0

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return shifted(self.inner(x)) * self.factor
"""
_OTHERS: dict[str, Callable[[Any], tuple[Any, str, Any]]] = {
    "number": lambda library: (library, "SCALE", 2.0),
    "import": lambda library: (library, "OFFSET", 0.5),
    "flag": lambda library: (library, "FLAG", True),
    "word": lambda library: (library, "WORD", "other"),
    "tuple": lambda library: (library, "PAIR", (1, 5.0)),
    "entry": lambda library: (library.TABLE, "by", 4.0),
    "new entry": lambda library: (library.EMPTY, "by", 2.5),
    "nested entry": lambda library: (library.NESTED["inner"], "by", 3.0),
    "namespace": lambda library: (library.SPACE, "by", 3.0),
    "table of a class": lambda library: (library.Registry._known, "one", 3.0),
    "class": lambda library: (library.Registry, "active", "two"),
    "object": lambda library: (library.settings, "offset", 1.5),
    "layer": lambda library: (library.Layer, "factor", -1.0),
}


@pytest.fixture
def library(tmp_path: Path) -> Iterator[ModuleType]:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "some_library.py").write_text(_SOURCE)
    sys.path.insert(0, str(folder))
    try:
        yield importlib.import_module("some_library")
    finally:
        sys.path.remove(str(folder))
        del sys.modules["some_library"]


def _set(patches: pytest.MonkeyPatch, owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, dict):
        patches.setitem(owner, name, value)
    else:
        patches.setattr(owner, name, value)


def _model(library: Any) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = library.Layer().eval()
    return model


def test_a_value_that_is_set_between_two_calls_counts(
    library: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = _model(library), torch.ones(2, 4)
    plain = model(x)
    with gascompile.compile(_model(library), None, cache_dir=tmp_path, fuse="off") as compiled:
        for kind, other in _OTHERS.items():
            torch.testing.assert_close(compiled(x), plain)
            with monkeypatch.context() as patches:
                _set(patches, *other(library))
                assert not torch.allclose(model(x), plain), kind
                torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize("kind", sorted(_OTHERS))
def test_a_kept_plan_is_of_the_values_of_then(
    library: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    x = torch.ones(2, 4)
    with gascompile.compile(_model(library), None, cache_dir=tmp_path) as compiled:
        torch.testing.assert_close(compiled(x), _model(library)(x))
    _set(monkeypatch, *_OTHERS[kind](library))
    with gascompile.compile(_model(library), None, cache_dir=tmp_path) as compiled:
        torch.testing.assert_close(compiled(x), _model(library)(x))


def test_a_value_that_nobody_reads_plans_nothing_again(
    library: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.ones(2, 4)
    caplog.set_level("INFO", logger="gascompile")
    with gascompile.compile(_model(library), None, cache_dir=tmp_path) as compiled:
        compiled(x)
        caplog.clear()
        library.settings.unread = 1
        library.KINDS[int] = 1  # a register that fills up
        compiled(x)
    with gascompile.compile(_model(library), None, cache_dir=tmp_path) as compiled:
        compiled(x)
    assert "from the cache" in caplog.text
    assert "captured" not in caplog.text


def test_what_is_set_for_a_context_counts(library: Any, tmp_path: Path) -> None:
    x = torch.ones(2, 4)

    def check(chosen: float) -> None:
        library.CHOSEN.set(chosen)
        torch.testing.assert_close(compiled(x), _model(library)(x))

    with gascompile.compile(_model(library), None, cache_dir=tmp_path) as compiled:
        for chosen in (1.0, 2.0):
            contextvars.copy_context().run(check, chosen)
        torch.testing.assert_close(compiled(x), _model(library)(x))
    with gascompile.compile(_model(library), None, cache_dir=tmp_path) as compiled:
        contextvars.copy_context().run(check, 3.0)


def test_what_a_library_counts_and_remembers_is_no_reason_to_plan_again(
    library: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, x = _model(library), torch.ones(2, 4)
    caplog.set_level("INFO", logger="gascompile")
    before = library.COUNT, library.WARNED, dict(library.MEMO), library.Counted.number
    with gascompile.compile(_model(library), None, cache_dir=tmp_path) as compiled:
        for _ in range(3):
            torch.testing.assert_close(compiled(x), model(x))
    assert caplog.text.count("captured and planned") == 1
    # As another process finds it.
    library.COUNT, library.WARNED, library.MEMO, library.Counted.number = before
    library.Counted.words.clear()
    library.SEEN.clear()
    caplog.clear()
    with gascompile.compile(_model(library), None, cache_dir=tmp_path) as compiled:
        for _ in range(3):
            torch.testing.assert_close(compiled(x), model(x))
    assert "from the cache" in caplog.text
    assert "captured" not in caplog.text


@pytest.mark.parametrize("kind", ["set", "list"])
def test_what_is_in_a_set_or_a_list_counts(library: Any, tmp_path: Path, kind: str) -> None:
    def change() -> None:
        if kind == "set":
            library.SET.symmetric_difference_update({"scaled"})
        else:
            library.LIST.append(library.LIST[-1] + 1.0)

    model, x = _model(library), torch.ones(2, 4)
    for _ in range(2):
        with gascompile.compile(_model(library), None, cache_dir=tmp_path) as compiled:
            torch.testing.assert_close(compiled(x), model(x))
            change()
            torch.testing.assert_close(compiled(x), model(x))
            change()
            torch.testing.assert_close(compiled(x), model(x))
        change()


def test_a_table_that_imports_what_it_is_asked_for_is_not_asked(library: Any) -> None:
    class Lazy(dict[str, float]):
        def items(self) -> Any:
            raise AssertionError("asked for all")

        values = keys = __iter__ = items

    lazy = Lazy(by=1.0)
    found = [name for _, _, name in plain_places(lazy, "lazy", lambda _: True)]
    assert found == ["the keys of lazy", "lazy['by']"]
