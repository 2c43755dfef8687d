"""Lists that libraries make of sets have one digest in all processes, and no others do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gascompile.capture.fingerprint.value_digest import ValueDigest


def digest_of(value: Any) -> str:
    digest = ValueDigest()
    digest.value(value)
    assert not digest.opaque
    return digest.digest()


@pytest.mark.parametrize("name", ["_use_default_values", "_signature_columns", "signature_columns"])
def test_the_order_of_a_librarys_set_is_none(name: str) -> None:
    digests = {
        digest_of(value)
        for kept in (["label", "labels", "input_ids"], ["input_ids", "label", "labels"])
        for value in (SimpleNamespace(**{name: kept}), SimpleNamespace(**{name: list(kept)}))
    }
    assert len(digests) == 1
    assert digest_of({name: ["a", "b"]}) == digest_of({name: ["b", "a"]})
    assert digest_of({name: ["a", "b"]}) != digest_of({name: ["a", "c"]})


def test_the_order_of_other_lists_counts() -> None:
    assert digest_of({"columns": ["a", "b"]}) != digest_of({"columns": ["b", "a"]})
