"""After an error or an interrupt at any point, the same executor runs again and is right."""

from __future__ import annotations

import _thread
import errno
import os
import threading
import time
from pathlib import Path

import pytest
import torch

from gascompile.core.errors import StorageError
from gascompile.core.machine import IoSettings
from gascompile.passes.graph.insert import insert
from gascompile.runtime.protocols import read_at
from gascompile.runtime.run.executor import Executor
from tests.runtime.toys import assert_runs, aten, make_plan, mlp


class Faulty:
    """A reader that raises at its ``at``-th read from now, once."""

    def __init__(self) -> None:
        self.left = -1
        self.error: BaseException = OSError(errno.EIO, os.strerror(errno.EIO))
        self._lock = threading.Lock()

    def __call__(self, descriptor: int, into: memoryview, offset: int, /) -> int:
        with self._lock:
            self.left -= 1
            if not self.left:
                raise self.error
        return read_at(descriptor, into, offset)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()])
def test_fault_of_any_read(tmp_path: Path, num_threads: int, error: BaseException) -> None:
    toy = mlp(tmp_path)
    io = IoSettings(num_threads=num_threads, chunk_bytes=16384)
    plan = make_plan(toy.workload, residents=frozenset(["layers.3.weight"]), seed=1, io=io)
    reader = Faulty()
    reader.error = error
    expected = StorageError if isinstance(error, OSError) else KeyboardInterrupt
    failed = 0
    with toy.session(plan, reader=reader) as session:
        executor = toy.executor(session, plan)
        for at in range(1, 40, 3):
            reader.left = at
            try:
                assert_runs(executor, toy, runs=2)
            except expected:
                failed += 1
            reader.left = -1
            assert_runs(executor, toy, runs=2)
    assert failed


def test_fault_while_residents_load(tmp_path: Path) -> None:
    toy = mlp(tmp_path)
    plan = make_plan(toy.workload, residents=frozenset(toy.weights))
    for at in range(1, 8):
        reader = Faulty()
        reader.left = at
        with toy.session(plan, reader=reader) as session:
            executor = toy.executor(session, plan)
            with pytest.raises(StorageError, match=r"op '.*' did not get 'layers\..*Input/output"):
                executor.run(torch.randn(4, 96))
            assert_runs(executor, toy, runs=2)
            assert session.is_loaded


@pytest.mark.parametrize("error", [RuntimeError("broken op"), KeyboardInterrupt()])
def test_fault_of_any_op(tmp_path: Path, error: BaseException) -> None:
    toy = mlp(tmp_path)
    plan = make_plan(toy.workload, residents=frozenset(["layers.3.weight"]), seed=2)
    module = insert(toy.program, plan)
    countdown = [-1]

    def faulty_relu(x: torch.Tensor) -> torch.Tensor:
        countdown[0] -= 1
        if not countdown[0]:
            raise error
        result: torch.Tensor = aten.relu.default(x)
        return result

    names = []
    for node in module.graph.nodes:
        if node.target is aten.relu.default:
            node.target = faulty_relu
            names.append(node.name)
    with toy.session(plan) as session:
        executor = Executor(session, module, plan, paranoid=True)
        for at, name in enumerate(names, start=1):
            countdown[0] = at
            with pytest.raises(type(error)) as raised:
                executor.run(torch.randn(4, 96))
            assert any(f"'{name}'" in note for note in raised.value.__notes__)
            raised.value.__notes__.clear()
            assert_runs(executor, toy, runs=2)


def test_interrupt_while_waiting(tmp_path: Path) -> None:
    toy = mlp(tmp_path)
    plan = make_plan(toy.workload, residents=frozenset(["layers.3.weight"]), seed=2)
    delay = [0.0]

    def slow(descriptor: int, into: memoryview, offset: int, /) -> int:
        time.sleep(delay[0])
        return read_at(descriptor, into, offset)

    with toy.session(plan, reader=slow) as session:
        executor = toy.executor(session, plan)
        assert_runs(executor, toy, runs=2)
        for i in range(8):
            delay[0] = 0.02
            timer = threading.Timer(0.005 + 0.007 * i, _thread.interrupt_main)
            with pytest.raises(KeyboardInterrupt):  # noqa: PT012
                timer.start()
                while True:
                    executor.run(torch.randn(4, 96))
            delay[0] = 0.0
            assert_runs(executor, toy, runs=2)


def test_truncated_file_names_op_and_file(tmp_path: Path) -> None:
    toy = mlp(tmp_path)
    plan = make_plan(toy.workload)
    with toy.path.open("r+b") as stream:
        stream.truncate(toy.path.stat().st_size // 2)
    with toy.session(plan) as session:
        executor = toy.executor(session, plan)
        with pytest.raises(StorageError, match=r"op '.*toy\.safetensors ends too early"):
            executor.run(torch.randn(4, 96))
