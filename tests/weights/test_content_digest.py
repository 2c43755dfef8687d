"""A digest of tensors names what they are to the last bit, and is the same for the file that holds them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from gascompile.weights import store
from gascompile.weights.store import content_digest, file_digest, spill

PIECE_BYTES = 64
DTYPES = (torch.uint8, torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64)
Tensors = dict[str, torch.Tensor]


@pytest.fixture(autouse=True, scope="module")
def small_pieces() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "PIECE_BYTES", PIECE_BYTES)
        yield


def made(dtype: torch.dtype, size_bytes: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == torch.bool else 256
    count = size_bytes // dtype.itemsize * dtype.itemsize
    raw = torch.randint(0, high, (count,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype)


# Around one piece and around several.
SIZES = st.one_of(
    st.integers(0, 3),
    st.builds(
        lambda pieces, off: max(0, pieces * PIECE_BYTES + off),
        st.integers(1, 4),
        st.integers(-9, 9),
    ),
)
TENSORS = st.dictionaries(
    st.text(st.characters(codec="utf-8", categories=("L", "N", "P")), min_size=1, max_size=5),
    st.builds(made, st.sampled_from(DTYPES), SIZES, st.integers(0, 99)),
    min_size=1,
    max_size=5,
)


@settings(max_examples=60, deadline=None)
@given(TENSORS, st.integers(1, 5))
def test_tensors_and_their_file_agree(tensors: Tensors, num_threads: int) -> None:
    alone = content_digest(tensors)
    told: list[int] = []
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda _: set(range(num_threads)))
        path = Path(folder, "model.safetensors")
        save_file(tensors, path)
        assert file_digest(path, told.append) == content_digest(tensors) == alone
        assert spill(tensors, Path(folder, "store")).stamps[0].path.endswith(f"{alone}.safetensors")
    assert sum(told) == sum(t.numel() * t.element_size() for t in tensors.values())


def _flipped(tensors: Tensors, name: str, at: int) -> Tensors:
    value = tensors[name]
    raw = value.clone().view(-1).view(torch.uint8)
    raw[at % len(raw)] ^= 1 if value.dtype == torch.bool else 1 << at % 8
    return tensors | {name: raw.view(value.dtype)}


def _renamed(tensors: Tensors, name: str, at: int) -> Tensors:
    return {known + "x" * (known == name): value for known, value in tensors.items()}


def _retyped(tensors: Tensors, name: str, at: int) -> Tensors:
    value = tensors[name]
    other = torch.int8 if value.dtype == torch.uint8 else torch.uint8
    return tensors | {name: value.view(other)}


def _reshaped(tensors: Tensors, name: str, at: int) -> Tensors:
    value = tensors[name]
    return tensors | {name: value[None] if at % 2 else value[:, None]}


def _less(tensors: Tensors, name: str, at: int) -> Tensors:
    return {known: value for known, value in tensors.items() if known != name}


@pytest.mark.parametrize("change", [_flipped, _renamed, _retyped, _reshaped, _less])
@settings(max_examples=60, deadline=None)
@given(tensors=TENSORS, at=st.integers(0, 10**4))
def test_a_change_is_seen(
    change: Callable[[Tensors, str, int], Tensors], tensors: Tensors, at: int
) -> None:
    names = [name for name in sorted(tensors) if change is not _flipped or tensors[name].numel()]
    if not names:
        return
    changed = change(tensors, names[at % len(names)], at)
    assert content_digest(changed) != content_digest(tensors)


def test_every_byte_counts() -> None:
    tensors = {"a": torch.arange(70, dtype=torch.uint8), "b": torch.arange(90, dtype=torch.uint8)}
    digests = {content_digest(_flipped(tensors, name, at)) for name in "ab" for at in range(70)}
    assert len(digests) == 140
    assert content_digest(tensors) not in digests


def test_bytes_that_another_tensor_begins_with_are_told_apart() -> None:
    one = {"a": torch.zeros(3), "b": torch.zeros(5)}
    assert content_digest(one) != content_digest({"a": torch.zeros(5), "b": torch.zeros(3)})
    # Names hold what stands between parts of a head elsewhere.
    odd = {"a|torch.float32|(0,)|b": torch.zeros(0)}
    assert content_digest(odd) != content_digest({"a": torch.zeros(0), "b": torch.zeros(0)})


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40))
def test_how_a_tensor_lies_in_memory_does_not_matter(rows: int, columns: int) -> None:
    whole = torch.arange(float(rows * columns)).reshape(rows, columns)
    assert content_digest({"a": whole.t()}) == content_digest({"a": whole.t().contiguous()})
    assert content_digest({"a": whole[:, ::2]}) == content_digest({"a": whole[:, ::2].clone()})


def test_one_element_with_the_strides_of_many_is_spilled(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(4.0)[1::3], "none": torch.zeros(0, 2)[:, ::2]}
    assert tensors["a"].stride() == (3,)
    loaded = load_file(spill(tensors, tmp_path / "store").stamps[0].path)
    assert loaded["a"].tolist() == [1.0]
    assert loaded["none"].shape == (0, 1)
