"""What libraries make at first use, and what is put in the place of their code: kept plans are of what is there now."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import gascompile

_SOURCE = """
from collections.abc import MutableMapping

from torch import nn

MADE = None
FAST = True


class Maker:
    def __init__(self, by):
        self.by = by


class Fast:
    by = 5.0


class Slow:
    by = 7.0


def shifted(x):
    global MADE, FAST
    if MADE is None:
        MADE = Maker(2.0)
    if isinstance(FAST, bool):
        FAST = Fast() if FAST else Slow()
    return x * MADE.by * FAST.by


def other(x):
    return x - 1.0


def twice(x):
    return x * 2


class Ways(MutableMapping):
    _known = {"twice": twice}

    def __getitem__(self, name):
        return self._known[name]

    def __setitem__(self, name, way):
        self._known[name] = way

    def __delitem__(self, name):
        del self._known[name]

    def __iter__(self):
        return iter(self._known)

    def __len__(self):
        return len(self._known)


WAYS = Ways()


def by(ways):
    def decorated(call):
        def chosen(x):
            return ways["twice"](call(x))

        return chosen

    return decorated


@by(WAYS)
def plain(x):
    return x + 1.0


class Chooses(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return plain(self.inner(x))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return shifted(self.inner(x))
"""


@pytest.fixture
def library(tmp_path: Path) -> Iterator[Any]:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "lazy_library.py").write_text(_SOURCE)
    sys.path.insert(0, str(folder))
    try:
        yield importlib.import_module("lazy_library")
    finally:
        sys.path.remove(str(folder))
        del sys.modules["lazy_library"]


def _fresh(library: Any) -> None:
    """Let the library be as a new process has it."""
    library.MADE, library.FAST = None, True


def _is_from_the_cache(
    make: Callable[[], nn.Module], cache: Path, caplog: pytest.LogCaptureFixture
) -> bool:
    """Return whether a plan was found; its results are eager's."""
    caplog.set_level("INFO", logger="gascompile")
    caplog.clear()
    x = torch.ones(2, 4)
    with gascompile.compile(make(), "64MiB", machine="cpu-nvme", cache_dir=cache) as compiled:
        found = compiled(x)
    is_found = "from the cache" in caplog.text
    with torch.no_grad():
        assert torch.equal(found, make()(x))
    return is_found


def _made(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().eval()


def test_what_a_library_makes_when_it_is_needed(
    library: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make = partial(_made, library.Layer)
    library.FAST = library.Fast()
    assert not _is_from_the_cache(make, tmp_path, caplog)
    assert _is_from_the_cache(make, tmp_path, caplog), "as the capture has left it"
    library.MADE = None
    assert _is_from_the_cache(make, tmp_path, caplog), "as a new process has it"
    library.MADE = library.Maker(3.0)
    assert not _is_from_the_cache(make, tmp_path, caplog), "as the program has set it"


def test_a_setting_that_a_library_replaces_counts(
    library: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make = partial(_made, library.Layer)
    assert not _is_from_the_cache(make, tmp_path, caplog)
    _fresh(library)
    library.FAST = False
    assert not _is_from_the_cache(make, tmp_path, caplog)


def test_a_table_of_functions_that_a_decorator_holds(
    library: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make, x = partial(_made, library.Chooses), torch.ones(2, 4)
    assert not _is_from_the_cache(make, tmp_path, caplog)
    library.WAYS["twice"] = library.other
    assert not _is_from_the_cache(make, tmp_path, caplog)
    with gascompile.compile(make(), "64MiB", machine="cpu-nvme", cache_dir=tmp_path) as compiled:
        for way in (library.other, library.twice, library.other):
            library.WAYS["twice"] = way
            torch.testing.assert_close(compiled(x), make()(x))


def test_a_function_of_torch_with_the_code_of_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make = partial(_made, _Activates)
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(functional.silu, "__code__", functional.mish.__code__)
        assert not _is_from_the_cache(make, tmp_path, caplog)
    assert not _is_from_the_cache(make, tmp_path, caplog)


def test_what_stands_in_the_place_of_code_of_torch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = partial(_made, _Calls)
    assert not _is_from_the_cache(make, tmp_path, caplog)
    assert _is_from_the_cache(make, tmp_path, caplog)
    stateless: Any = torch.nn.utils.stateless
    monkeypatch.setattr(stateless, "_functional_call", partial(_thrice, stateless._functional_call))
    assert not _is_from_the_cache(make, tmp_path, caplog)


class _Activates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.silu(self.inner(x))


class _Calls(_Activates):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.func.functional_call(
            self.inner, dict(self.inner.named_parameters()), (x,)
        )
        return found


def _thrice(call: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    return call(*args, **kwargs) * 3
