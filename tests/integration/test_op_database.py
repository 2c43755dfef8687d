"""Ops of torch's op database keep the smallest budget that a plan has for them, and reports say what they took."""

from __future__ import annotations

import os
import warnings
from collections import Counter

import pytest

from gascompile.codegen.build import has_compiler
from gascompile.core.config import default_cache_dir

pytestmark = pytest.mark.skipif(not has_compiler(), reason="needs a C++ compiler")

_ALL = "GASCOMPILE_ALL_OPS" in os.environ
"""Some twelve minutes instead of fifteen seconds."""
_EVERY = 1 if _ALL else 37
_SCALES = (1, 20) if _ALL else (8,)


@pytest.mark.timeout(3600 if _ALL else 600)
def test_ops_keep_their_smallest_budget() -> None:
    # Three seconds of imports that no other test needs: not every worker comes here.
    from tests.integration.op_database import Found, modules, tried

    found: list[Found] = []
    with warnings.catch_warnings():
        # Ops of the database warn of what they are about to lose.
        warnings.simplefilter("ignore")
        for scale in _SCALES:
            for name, module in modules(scale=scale, every=_EVERY):
                found.append(tried(name, module, default_cache_dir()))
    counts = Counter(result.outcome for result in found)
    print(dict(counts))
    wrong = [f"{result.op}: {result.wrong}" for result in found if result.wrong]
    assert not wrong, "\n".join(wrong)
    assert counts["kept"] > len(found) * 0.8
