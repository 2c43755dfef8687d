"""Gates, turns and own threads; interrupts of everything that runs; what a child of a fork can do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from gascompile.core.errors import ForkedError
from gascompile.core.own_work import OwnWork
from gascompile.core.waiting import Gate, OwnThread, Pool, Turn, own_threads
from tests.interrupted_captures import CAPTURES
from tests.interrupted_runs import RUNS
from tests.interrupted_steps import STEPS, Trained
from tests.interrupts import Generated, Streamed
from tests.runtime.toys import make_plan, mlp
from tests.waiting import eventually

ROOT = Path(__file__).resolve().parents[2]


def in_child(body: Callable[[], None]) -> None:
    """Run ``body`` in a child of a fork and assert that it ended well, and in time."""
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            body()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_gate_that_an_interrupt_left_lets_others_through() -> None:
    gate = Gate()
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for _ in range(3):
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            with pytest.raises(KeyboardInterrupt):
                gate.wait()
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    passed: list[int] = []

    def wait() -> None:
        gate.wait()
        passed.append(1)

    others = [threading.Thread(target=wait) for _ in range(3)]
    for other in others:
        other.start()
    gate.open()
    gate.wait()
    for other in others:
        other.join(10)
    assert passed == [1, 1, 1]


def test_a_turn_is_over_whatever_ends_it_and_may_be_taken_again_within() -> None:
    turn = Turn()
    with pytest.raises(KeyError):
        turn.take(partial(dict[str, int]().pop, "nothing"))
    order: list[str] = []

    def other() -> None:
        turn.take(lambda: order.append("other"))

    thread = threading.Thread(target=other)

    def body() -> None:
        thread.start()
        time.sleep(0.02)
        turn.take(lambda: order.append("within"))

    turn.take(body)
    thread.join(10)
    assert order == ["within", "other"]


def test_who_is_interrupted_before_its_turn_takes_it_from_nobody() -> None:
    turn, held, ends = Turn(), Gate(), Gate()

    def hold() -> None:
        held.open()
        ends.wait()

    thread = threading.Thread(target=turn.take, args=(hold,))
    thread.start()
    held.wait()
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        with pytest.raises(KeyboardInterrupt):
            turn.take(lambda: None)
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    assert thread.is_alive()
    ends.open()
    thread.join(10)
    assert turn.take(lambda: 1) == 1


def test_own_threads_are_seen_and_no_signal_reaches_them() -> None:
    ends = Gate()
    masks: list[set[signal.Signals | int]] = []

    def work() -> None:
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, []))
        ends.wait()

    thread = OwnThread(work, "gascompile-test")
    while "gascompile-test" not in own_threads():
        time.sleep(0.001)
    ends.open()
    thread.join()
    assert not thread.is_alive
    assert "gascompile-test" not in own_threads()
    assert {signal.SIGINT, signal.SIGALRM, signal.SIGTERM} <= set(masks[0])
    assert signal.SIGSEGV not in masks[0]


class _Owner:
    """Can be dropped."""


def test_own_work_is_done_whoever_waits_and_is_interrupted() -> None:
    owner, done = _Owner(), list[str]()
    work, goes_on = OwnWork("gascompile-test", owner), Gate()

    def slow(text: str) -> None:
        goes_on.wait()
        done.append(text)

    signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
        # The first interrupt waits for the end, the second does not.
        with pytest.raises(KeyboardInterrupt):
            work.do(partial(slow, "interrupted"))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    assert done == []
    goes_on.open()
    work.wait()
    assert done == ["interrupted"]
    with pytest.raises(ZeroDivisionError):
        work.do(lambda: 1 // 0, is_last=True)
    work.do(partial(slow, "next"))
    work.when_dropped = partial(slow, "dropped")
    del owner
    work.do(partial(slow, "after"))
    assert done == ["interrupted", "next", "dropped", "after"]
    assert eventually(lambda: "gascompile-test" not in own_threads())


def test_own_work_ends_when_it_is_told_to() -> None:
    owner, done = _Owner(), list[int]()
    work = OwnWork("gascompile-test", owner)
    work.do(partial(done.append, 1), is_last=True)
    assert "gascompile-test" not in own_threads()
    work.do(partial(done.append, 2), is_last=True)
    assert done == [1, 2]


class _Blocks:
    """Serves every request by waiting until the test lets it go."""

    def __init__(self) -> None:
        self.ends = Gate()
        self.begun: list[int] = []

    def take(self, heap: list[tuple[int, int, int]]) -> Callable[[], None] | None:
        return partial(self._serve, heap.pop()[2]) if heap else None

    def cancel(self, request: int) -> None:
        raise AssertionError(request)

    def _serve(self, request: int) -> None:
        self.begun.append(request)
        self.ends.wait()


def test_messages_that_share_a_bell_wake_a_thread_each() -> None:
    server = _Blocks()
    pool = Pool[int](server, 3, "gascompile-test")
    pool.start()
    time.sleep(0.05)  # most likely all of them are asleep by then; they hear one bell
    for request in range(3):
        pool._inbox.put((0, request, request))
    pool._bell.put(None)
    assert eventually(lambda: len(server.begun) == 3)
    server.ends.open()
    pool.close()


def test_a_child_waits_for_no_thread_and_no_turn_of_its_parents() -> None:
    ends, turn, held = Gate(), Turn(), Gate()
    thread = OwnThread(ends.wait, "gascompile-test")

    def hold() -> None:
        held.open()
        ends.wait()

    other = threading.Thread(target=turn.take, args=(hold,))
    other.start()
    held.wait()

    def child() -> None:
        assert not thread.is_alive
        thread.join()
        assert turn.take(lambda: 1) == 1
        with pytest.raises(ForkedError, match="forked"):
            ends.wait()

    in_child(child)
    ends.open()
    other.join()
    thread.join()


def test_a_session_of_the_parents_is_refused_in_a_child_and_closes(tmp_path: Path) -> None:
    toy = mlp(tmp_path)
    plan = make_plan(toy.workload, residents=frozenset(["layers.3.weight"]), seed=1)
    x = torch.randn(4, 96)
    with toy.session(plan) as session:
        executor = toy.executor(session, plan)
        expected = executor.run(x)

        def child() -> None:
            with pytest.raises(ForkedError, match="make a new one"):
                executor.run(x)
            session.close()
            with toy.session(plan) as own:
                torch.testing.assert_close(toy.executor(own, plan).run(x), expected)

        in_child(child)
        torch.testing.assert_close(executor.run(x), expected)


def test_a_model_opens_anew_in_a_child_and_a_step_is_refused(tmp_path: Path) -> None:
    streamed, trained = Streamed(tmp_path / "streamed"), Trained(tmp_path / "trained")

    def child() -> None:
        streamed.same(streamed.model)
        for refused in (partial(trained.step, trained.batches[1]), trained.step.state_dict):
            with pytest.raises(ForkedError, match="the training step"):
                refused()
        with pytest.raises(ForkedError, match="the training step"):
            trained.step.save(trained.folder)

    in_child(child)
    streamed.same(streamed.model)
    assert float(trained.step(trained.batches[1])) == trained.expected[0]
    trained.step.close()


def test_who_was_interrupted_while_closing_a_generator_generates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Generated(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Pool, "close", lambda _: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            case.generator.close()
    case.check()


NUM_INTERRUPTS = int(os.environ.get("GASCOMPILE_INTERRUPTS", "32"))
KINDS = ("inference", "threads", "close", "save", "load", "generation")
NUM_KINDS = len(KINDS) + len(STEPS) + len(RUNS) + len(CAPTURES)


@pytest.mark.parametrize(
    "kinds",
    [(*KINDS, *CAPTURES), (*STEPS, *RUNS)],
    ids=["inference and captures", "steps and runs"],
)
def test_nothing_hangs_or_goes_wrong_after_interrupts(kinds: tuple[str, ...]) -> None:
    """Take as many as the environment says; every one has a watchdog, wide here for busy machines."""
    count = max(1, NUM_INTERRUPTS // NUM_KINDS)
    found = subprocess.run(
        [sys.executable, "-m", "tests.interrupts", ",".join(kinds), str(count), "7"],
        cwd=ROOT,
        env={"GASCOMPILE_WATCHDOG_S": "30", **os.environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=550,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert [line.split(":")[0] for line in found.stdout.splitlines()] == list(kinds)
