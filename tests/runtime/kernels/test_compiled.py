"""Every kernel is compiled for a Hopper GPU, which Triton does on any machine: what comes out is looked at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.hopper import compiled_by


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory, root: Path) -> list[dict[str, Any]]:
    cache = tmp_path_factory.mktemp("triton")
    return compiled_by("tests.runtime.kernels.hopper", cache=cache, root=root)


def test_all_kernels_compile(compiled: list[dict[str, Any]]) -> None:
    names = {found["kernel"] for found in compiled}
    assert names == {
        "_cast",
        "_unpack_signed",
        "_unpack_int4",
        "_one_row",
        "_one_row_signed",
        "_one_row_int4",
        "_few_rows",
        "_few_rows_signed",
        "_few_rows_int4",
        "_add_parts",
    }


def test_packed_bytes_are_loaded_in_wide_pieces(compiled: list[dict[str, Any]]) -> None:
    """A weight that is read a byte at a time would be read many times slower than memory allows."""
    for found in compiled:
        is_unpacking = found["kernel"] in {"_unpack_signed", "_unpack_int4"}
        is_product = found["kernel"] in {"_one_row", "_one_row_signed", "_one_row_int4"}
        if is_unpacking or (is_product and found["form"]["block_outputs"] == "4"):
            assert "ld.global.v4" in found["ptx"], found["form"]
            # Codes of scales come byte by byte, one for sixteen values or more; lower bits in planes do, too.
            if not found["kernel"].endswith("signed"):
                assert "ld.global.b8" not in found["ptx"], found["form"]


def test_several_rows_go_to_the_tensor_cores(compiled: list[dict[str, Any]]) -> None:
    for found in compiled:
        if found["kernel"].startswith("_few_rows") and found["form"]["x"] != "*fp32":
            assert "mma" in found["ptx"], found["form"]


def test_shared_memory_fits_with_several_programs_per_multiprocessor(
    compiled: list[dict[str, Any]],
) -> None:
    """228 KiB per multiprocessor: two programs, as the tiling counts on, take no more than half each."""
    for found in compiled:
        assert found["shared_bytes"] <= 114 * 1024, (found["kernel"], found["shared_bytes"])
