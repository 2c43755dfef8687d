"""What every test shares: visible skips for missing hardware, repeatable numbers, a private cache."""

from __future__ import annotations

import fcntl
import gc
import importlib.util
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from gascompile.bundles import plan_cache
from gascompile.bundles.reuse import CachedPlan
from gascompile.codegen.build import compiler
from gascompile.core.machine import Machine
from gascompile.cost_models.measure import machine as measuring
from gascompile.cost_models.measure.disk import ProbeReader
from gascompile.machines import resolve
from gascompile.runtime.transfer.engine import read_blocks
from tests.compiler import remembering_compiler

# Timings on shared machines vary too much for a deadline; fixed examples make a failure repeatable.
settings.register_profile("gascompile", deadline=None, derandomize=True)
settings.load_profile("gascompile")

if not torch.cuda.is_available():
    # Triton decides when it is imported, and a test module of any folder may be what imports it.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests whose hardware is missing, with the reason in the report."""
    has_gpu = torch.cuda.is_available()
    has_gds = has_gpu and importlib.util.find_spec("kvikio") is not None
    for item in items:
        if "gpu" in item.keywords and not has_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if "gds" in item.keywords and not has_gds:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device and kvikio"))


def pytest_collection_finish() -> None:
    """Take what has been imported out of the garbage collector's rounds: it stays, and tracing starts many."""
    gc.collect()
    gc.freeze()
    # [Empirical] Python's own (700, 10, 10) take 7 % of the processor time of tests of steps; these 5 %, of which
    # most is asked for.
    gc.set_threshold(2000, 20, 50)


_MANY_OBJECTS = 100_000
"""[Empirical] A round over so many takes 20 ms, over all that a run imports and keeps until its end 200."""


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Do so again between modules, where tests have imported more: traces ask for rounds over all there is."""
    is_last = nextitem is None or nextitem.path != item.path
    if is_last and len(gc.get_objects(generation=2)) > _MANY_OBJECTS:
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _private_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the user's cache out of the tests, and theirs in one place so a machine is measured once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


@pytest.fixture(scope="session", autouse=True)
def _compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compile each source once for all workers and for the processes that tests start."""
    found = remembering_compiler(compiler(), _shared(tmp_path_factory) / "compiler")
    with pytest.MonkeyPatch.context() as patch:
        if found is not None:
            # By its name: a process without a path has no compiler.
            patch.setenv("PATH", str(found.parent), prepend=os.pathsep)
            patch.setenv("CXX", found.name)
        yield


@pytest.fixture(scope="session", autouse=True)
def _measured_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Measure this machine once for all workers; tests of measuring put something in the place of its parts."""
    measure, of_parts = resolve.measure_briefly, measuring.measure_machine
    folder = _shared(tmp_path_factory) / "machine"
    folder.mkdir(exist_ok=True)

    def once(*, cache_dir: str | os.PathLike[str], read: ProbeReader) -> Machine:
        if read is not read_blocks or measuring.measure_machine is not of_parts:
            return measure(cache_dir=cache_dir, read=read)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            machine = resolve.remembered_machine(folder) or measure(cache_dir=folder, read=read)
        resolve.remember_machine(machine, resolve.made_folder(Path(cache_dir)))
        return machine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resolve, "measure_briefly", once)
        yield


@pytest.fixture(scope="session")
def run_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache folder that all workers of this run share, for tests that do not look at what it holds.

    A plan is found by all that it was made of, so one that another test has kept is the one that would be made.
    """
    folder = _shared(tmp_path_factory) / "run_cache"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def filled_once(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str, Callable[[Path], None]], Path]:
    """Return a function that gives a folder of all workers: the first to ask fills it, others wait for that."""
    place = _shared(tmp_path_factory) / "filled_once"
    place.mkdir(exist_ok=True)

    def filled(name: str, fill: Callable[[Path], None]) -> Path:
        folder, done = place / name, place / f"{name}.done"
        with (place / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                fill(folder)
                done.touch()
        return folder

    return filled


@pytest.fixture
def _kept_plans(run_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep plans where all workers find them, for tests of anything but captures and the cache of plans."""
    place = property(lambda self: plan_cache.folder_of(run_cache, self.prints))
    monkeypatch.setattr(CachedPlan, "folder", place)


def _shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of this run of the tests that all workers have."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session", autouse=True)
def _interrupts() -> Iterator[None]:
    """Take SIGINT as a terminal's shell leaves it: background jobs and ``nohup`` start with it ignored.

    Processes that tests start inherit what is ignored, so they are put right by this, too.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def root() -> Path:
    """Return the root of the repository."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture
def _quick_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have training steps planned in two seconds, for tests of anything but how good a plan is."""
    import gascompile

    quick = partial(gascompile.compile_step, time_limit_s=2.0)
    monkeypatch.setattr(gascompile, "compile_step", quick)


@pytest.fixture(autouse=True)
def _same_threads() -> Iterator[None]:
    """Give threads back as they were: how sums are rounded depends on their number."""
    before = torch.get_num_threads()
    yield
    if torch.get_num_threads() != before:
        torch.set_num_threads(before)
