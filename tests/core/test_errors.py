"""Errors carry their numbers, say them, and survive a process boundary."""

from __future__ import annotations

import inspect
import pickle

import pytest

from gascompile.core import errors
from gascompile.core.errors import GASCompileError, InfeasiblePlanError, PlanVerificationError

ERROR_TYPES = [
    member
    for _, member in inspect.getmembers(errors, inspect.isclass)
    if issubclass(member, Exception) and not issubclass(member, Warning)
]


@pytest.mark.parametrize("error_type", ERROR_TYPES)
def test_every_error_has_the_one_root(error_type: type[Exception]) -> None:
    assert issubclass(error_type, GASCompileError)
    assert not issubclass(error_type, (ValueError, TypeError, OSError))


def infeasible() -> InfeasiblePlanError:
    return InfeasiblePlanError(required_bytes=3 << 20, limit_bytes=1 << 20, tier="cpu", op="mm_1")


def test_infeasible_says_numbers_op_and_what_to_try() -> None:
    text = str(infeasible())
    for part in ("1.00 MiB", "3.00 MiB", "'cpu'", "'mm_1'", "give 'cpu' 3.00MiB or more"):
        assert part in text


def test_infeasible_survives_pickling() -> None:
    copy = pickle.loads(pickle.dumps(infeasible()))
    assert isinstance(copy, InfeasiblePlanError)
    assert (copy.required_bytes, copy.limit_bytes, copy.tier, copy.op) == (
        3 << 20,
        1 << 20,
        "cpu",
        "mm_1",
    )
    assert str(copy) == str(infeasible())


def test_verification_names_the_step() -> None:
    assert PlanVerificationError("bad", step=7).step == 7
    assert PlanVerificationError("bad").step == -1
