"""Real signals at random moments of everything that runs: nothing hangs, and the next call is right.

Run it as a program, ``python -m tests.interrupts KIND,KIND COUNT SEED``: the watchdog of a hang ends the process.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Protocol

import torch
from torch import nn

import gascompile
from gascompile.core.errors import StorageError
from gascompile.integrations.generation import Generator
from tests.interrupted_captures import CAPTURES
from tests.interrupted_runs import RUNS, started
from tests.interrupted_steps import STEPS
from tests.training.runs import MACHINE

WATCHDOG_S = float(os.environ.get("GASCOMPILE_WATCHDOG_S", "5"))
"""For an act and its check; ten times as much for what plans, and for the end of the process."""
HOST = dataclasses.replace(MACHINE, name="by hand too", links=MACHINE.links[:1])


class Case(Protocol):
    """Something to interrupt."""

    def act(self) -> object:
        """Do what is interrupted."""
        ...

    def check(self) -> None:
        """Assert that all is right now."""
        ...


class Storm:
    """Raises ``KeyboardInterrupt`` for as many signals as it is told, and none after them."""

    def __init__(self) -> None:
        self.left = self.raised = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.left <= 0:
            signal.setitimer(signal.ITIMER_REAL, 0)
            return
        self.left -= 1
        self.raised += 1
        raise KeyboardInterrupt

    def over(self, act: Callable[[], object], *, after_s: float, every_s: float, count: int) -> int:
        """Run ``act`` in a storm that begins after so many seconds; return how often it was interrupted."""
        self.left, self.raised = count, 0
        try:
            signal.setitimer(signal.ITIMER_REAL, max(after_s, 1e-6), every_s)
            act()
            self.left = 0
        except (KeyboardInterrupt, StorageError, OSError):
            # At once: what comes now is the caller's own work. A folder that is being removed loses the interrupt.
            self.left = 0
            if not self.raised:
                raise
        signal.setitimer(signal.ITIMER_REAL, 0)
        return self.raised


class Streamed:
    """A model whose weights stream, with two signatures and a thread that calls it meanwhile."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(3)
        self.folder = folder
        model = nn.Sequential(
            nn.Embedding(512, 256),
            *(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(6)),
        ).eval()
        self.model = gascompile.compile(model, 900_000, machine=HOST, cache_dir=folder / "cache")
        self.inputs = [torch.randint(0, 512, (rows,)) for rows in (3, 9)]
        with torch.no_grad():
            self.expected = [model(x) for x in self.inputs]
        self.bundle = folder / "bundle"
        # Planned up front, as that takes longer than a watchdog gives; the first is the one that is saved.
        for x in reversed(self.inputs):
            self.model(x)
        self.model.save(self.bundle)

    def act(self) -> None:
        """Call it."""
        for x in self.inputs[:1] * 2 + self.inputs:
            self.model(x)

    def check(self) -> None:
        """Compare both signatures, once more from another thread, too."""
        assert torch.is_grad_enabled()
        self.same(self.model)
        other = threading.Thread(target=self.same, args=(self.model,))
        other.start()
        other.join()

    def same(self, model: gascompile.CompiledModel) -> None:
        """Compare a model with eager."""
        for x, expected in zip(self.inputs, self.expected, strict=True):
            torch.testing.assert_close(model(x), expected)


class Shared(Streamed):
    """The same while another thread calls it."""

    def act(self) -> None:
        """Call it beside a thread that does."""
        started(threading.Thread(target=self.same, args=(self.model,), daemon=True))
        super().act()


class Closed(Streamed):
    """Closing, and the call that opens it again."""

    def act(self) -> None:
        """Close and open it."""
        self.model.close()
        self.model(self.inputs[0])


class Saved(Streamed):
    """Saving over a bundle."""

    def act(self) -> None:
        """Save it."""
        self.model.save(self.bundle)

    def check(self) -> None:
        """Load what is there."""
        with gascompile.load(self.bundle, any_machine=True) as found:
            torch.testing.assert_close(found(self.inputs[0]), self.expected[0])


class Loaded(Saved):
    """Loading a bundle, its first call and its end."""

    def act(self) -> None:
        """Load, run and close it."""
        with gascompile.load(self.bundle, any_machine=True) as found:
            found(self.inputs[0])


class Generated:
    """A small language model that generates."""

    def __init__(self, folder: Path) -> None:
        import transformers

        torch.manual_seed(4)
        config = transformers.LlamaConfig(
            vocab_size=101,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
            bos_token_id=None,
            eos_token_id=None,
        )
        model = transformers.LlamaForCausalLM(config).eval()
        self.generator = Generator(
            model,
            400_000,
            max_length=40,
            prefill_tokens=8,
            machine=HOST,
            cache_dir=folder / "cache",
        )
        self.prompts = [torch.arange(7, 19), torch.arange(9, 14)]
        self.expected = [list(self.generator.stream(prompt, 6)) for prompt in self.prompts]
        for prompt, expected in zip(self.prompts, self.expected, strict=True):
            with torch.no_grad():
                whole = model.generate(prompt[None], max_new_tokens=6, do_sample=False)
            assert whole[0, len(prompt) :].tolist() == expected

    def act(self) -> None:
        """Generate, close and generate."""
        list(self.generator.stream(self.prompts[0], 4))
        self.generator.close()
        list(self.generator.stream(self.prompts[1], 2))

    def check(self) -> None:
        """Compare two answers."""
        for prompt, expected in zip(self.prompts, self.expected, strict=True):
            assert list(self.generator.stream(prompt, 6)) == expected


CASES: dict[str, Callable[[Path], Case]] = {
    "inference": Streamed,
    "threads": Shared,
    "close": Closed,
    "save": Saved,
    "load": Loaded,
    "generation": Generated,
    **STEPS,
    **RUNS,
    **CAPTURES,
}


def disturb(case: Case, count: int, seed: int) -> Iterator[int]:
    """Interrupt a case ``count`` times and check it after each; yields how many signals have raised."""
    generator, storm = random.Random(seed), Storm()
    signal.signal(signal.SIGALRM, storm)
    for _ in range(2):
        start_s = time.perf_counter()
        case.act()
        time_s = time.perf_counter() - start_s
        case.check()
    done = num_misses = 0
    while done < count:
        watch(WATCHDOG_S)
        start_s = time.perf_counter()
        raised = storm.over(
            case.act,
            after_s=generator.uniform(0, time_s * 1.1),
            every_s=generator.choice([0, 50e-6, 200e-6, 1e-3]) or 1e-3,
            count=generator.choice([1, 1, 2, 5]),
        )
        if not raised:
            time_s = time.perf_counter() - start_s
        case.check()
        num_misses = 0 if raised else num_misses + 1
        assert num_misses < 1000, "no signal breaks it off"
        done += bool(raised)
        yield raised


def watch(limit_s: float) -> None:
    """End the process, with what its threads are at, unless told again within so many seconds."""
    faulthandler.dump_traceback_later(limit_s, exit=True)


def main() -> None:
    """Run cases as the command line says, and print how they went."""
    kinds, count, seed = sys.argv[1].split(","), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    for kind in kinds:
        folder = Path(tempfile.mkdtemp(prefix="interrupts-"))
        watch(10 * WATCHDOG_S)
        try:
            case = CASES[kind](folder)
            raised = [n for n in disturb(case, count, seed) if n]
            typed = getattr(case, "typed", 0)
            print(f"{kind}: {len(raised)} interrupted, {sum(raised)} signals, {typed} typed errors")
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    watch(10 * WATCHDOG_S)


if __name__ == "__main__":
    main()
