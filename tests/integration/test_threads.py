"""Several threads that capture, plan and run models of their own at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch import nn

import gascompile


def new_model(depth: int) -> nn.Module:
    torch.manual_seed(depth)
    return nn.Sequential(*(part for _ in range(depth) for part in (nn.Linear(16, 16), nn.GELU())))


def run_all(*bodies: Callable[[], None]) -> None:
    """Run each on a thread of its own; raise what one of them raised."""
    with ThreadPoolExecutor(len(bodies)) as pool:
        for running in [pool.submit(body) for body in bodies]:
            running.result()


def compile_and_run(depth: int, cache_dir: Path) -> None:
    model = new_model(depth)
    with torch.no_grad(), gascompile.compile(model, None, cache_dir=cache_dir) as compiled:
        for rows in (3, 4, 5):
            x = torch.ones(rows, 16)
            torch.testing.assert_close(compiled(x), model(x))


def test_captures_on_several_threads_take_turns(tmp_path: Path) -> None:
    called = nn.Module.__call__
    run_all(*(partial(compile_and_run, depth, tmp_path) for depth in (2, 3, 4)))
    assert nn.Module.__call__ is called
    compile_and_run(5, tmp_path)


def test_a_planned_model_runs_on_while_another_is_captured(
    tmp_path: Path,
) -> None:
    model, x = new_model(2), torch.ones(3, 16)
    is_over = threading.Event()
    with torch.no_grad(), gascompile.compile(model, None, cache_dir=tmp_path) as compiled:
        wanted = compiled(x).clone()
        num_calls = 0

        def serve() -> None:
            nonlocal num_calls
            with torch.no_grad():
                while not is_over.is_set():
                    torch.testing.assert_close(compiled(x), wanted)
                    num_calls += 1

        def capture() -> None:
            try:
                compile_and_run(20, tmp_path)
            finally:
                is_over.set()

        run_all(serve, capture)
        assert num_calls
