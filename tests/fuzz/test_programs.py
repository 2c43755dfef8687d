"""Random programs give eager's results, and leave behind what eager leaves.

``GASCOMPILE_PROGRAMS=1000`` tries so many, ``GASCOMPILE_FIRST=4711`` begins with another one.
"""

from __future__ import annotations

import copy
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import gascompile
from gascompile.core.errors import CaptureError, UnsupportedOpError
from tests.fuzz.programs import Program, Value, inputs_of, program_of, tensors_of, texts
from tests.training.runs import MACHINE

_COUNT = int(os.environ.get("GASCOMPILE_PROGRAMS", "16"))
_FIRST = int(os.environ.get("GASCOMPILE_FIRST", "0"))
_EACH = 8
"""Programs of one test."""


def _in_model(outputs: Any, model: Program) -> list[bool]:
    """Return which outputs lie in a weight or a buffer; those of a compiled model are copies by contract."""
    kept = {t.untyped_storage().data_ptr() for t in (model.weight, model.kept)}
    return [t.untyped_storage().data_ptr() in kept for t in tensors_of(outputs)]


def _sharing(tensors: list[Value]) -> list[tuple[bool, bool]]:
    """Return which tensors are one, and which begin at one place."""
    return [
        (a is b, a.data_ptr() == b.data_ptr() and a.numel() > 0) for a in tensors for b in tensors
    ]


def _require_equal(
    found: tuple[Any, Any, Program], wanted: tuple[Any, Any, Program], text: str
) -> None:
    """Compare outputs, inputs and models after a call: values, shapes, and what is one tensor or lies in one memory."""
    (outputs, inputs, model), (others, given, twin) = found, wanted
    own, theirs = [*tensors_of(outputs)], [*tensors_of(others)]
    copied = _in_model(others, twin)
    for a, b in zip(
        [*own, *inputs, model.weight, model.kept],
        [*theirs, *given, twin.weight, twin.kept],
        strict=True,
    ):
        # Bits of a product depend on where its operands lie.
        torch.testing.assert_close(a, b, msg=lambda why: f"{text}: {why}")
    apart = [
        [t for t, is_copy in zip(of, copied, strict=True) if not is_copy] for of in (own, theirs)
    ]
    assert _sharing([*apart[0], *inputs]) == _sharing([*apart[1], *given]), text


def _tried(seed: int, folder: Path) -> bool:
    """Compare a program with eager; return whether there was anything to compare."""
    is_compared = False
    rng = random.Random(seed)
    program = program_of(rng, inputs_of(rng))
    twin = copy.deepcopy(program)
    draws = [rng.randrange(1 << 30) for _ in range(3)]
    calls = [inputs_of(random.Random(draw)) for draw in draws]
    others = [inputs_of(random.Random(draw)) for draw in draws]
    with (
        gascompile.compile(program, "1MiB", machine=MACHINE, cache_dir=folder) as compiled,
        torch.no_grad(),
    ):
        for own, other in zip(calls, others, strict=True):
            trial = copy.deepcopy(twin)
            try:
                wanted = trial(*other)
            except (RuntimeError, IndexError):
                continue  # of other sizes than the program was made for
            twin = trial
            try:
                found = compiled(*own)
            except (CaptureError, UnsupportedOpError):
                return False
            text = f"{seed}: {texts(program)}"
            is_compared = True
            _require_equal((found, own, program), (wanted, other, twin), text)
    return is_compared


@pytest.mark.parametrize("first", range(_FIRST, _FIRST + _COUNT, _EACH))
def test_programs_are_as_in_eager(first: int, tmp_path: Path) -> None:
    compiled = [_tried(seed, tmp_path / str(seed)) for seed in range(first, first + _EACH)]
    assert sum(compiled) >= _EACH // 2
