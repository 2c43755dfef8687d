"""Products with packed weights by compiled code: what ``formats.ops`` calls once it is installed.

The library is loaded from a file; who makes that file is no matter of the runtime. Where a shape or dtype is not for
it, ``formats.ops`` computes in plain torch.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, Final

import torch

from gascompile.core.own_files import load_own
from gascompile.formats import ops as format_ops
from gascompile.formats.layout import BLOCKS, FORMS, LOW_BITS, PACKED_FORMS, packed_parts, row_bytes
from gascompile.formats.packings import WORD_BITS, Packing
from gascompile.formats.unpack import fp8_table

SOURCE: Final = "packed.cpp"
MAX_FEW_ROWS: Final = 4
"""Rows of inputs that are multiplied value by value."""
_FEWEST_BLOCKS: Final = 4
"""Per thread: one that is held up leaves its blocks to the others."""
_ROW_GROUP: Final = 16  # rows that compiled kernels decode together
_CODES: Final = {
    "bfloat16": 16,
    "int4": 4,
    **{form: 8 + low_bits for form, low_bits in LOW_BITS.items()},
    "q8_0": 108,
    "q4_0": 104,
    "q4_k": 204,
    "q6_k": 206,
}
_KINDS: Final = {"gptq": 1, "awq": 2, "packed": 3, "fp8": 5}
_NUMBER, _ADDRESS = ctypes.c_int64, ctypes.c_void_p


class _Layout(ctypes.Structure):
    _fields_ = tuple(
        (name, _NUMBER)
        for name in ("columns", "low_bits", "low_bytes", "group", "scales_offset", "steps_offset")
    )


class _Task(ctypes.Structure):
    _fields_ = (
        ("x", _ADDRESS),
        ("rows", _NUMBER),
        ("weight", _ADDRESS),
        ("outputs", _NUMBER),
        ("row_stride", _NUMBER),
        ("out", _ADDRESS),
        ("out_stride", _NUMBER),
    )


class _Apart(ctypes.Structure):
    _fields_ = (
        ("codes", _ADDRESS),
        *((n, _NUMBER) for n in ("stride", "bits", "rows", "columns", "groups", "group")),
        ("zeros", _ADDRESS),
        ("scales", _ADDRESS),
        ("middle", ctypes.c_float),
        ("order", _ADDRESS),
        ("out", _ADDRESS),
        ("out_stride", _NUMBER),
        ("table", _ADDRESS),
    )


class PackedKernels:
    """The functions of the library; each says whether it did the work."""

    def __init__(self, path: Path) -> None:
        """Load the library; raises ``OSError`` where it is none, ``AttributeError`` where it is another."""
        library = load_own(path)
        self._few, self._many, self._decode = (
            getattr(library, name) for name in ("gas_few_rows", "gas_many_rows", "gas_decode")
        )
        for function in (self._few, self._many, self._decode):
            function.argtypes, function.restype = (_NUMBER, _ADDRESS, _ADDRESS), ctypes.c_int
        self._many.argtypes += (_ADDRESS, _NUMBER, _NUMBER, _ADDRESS)
        self._unpack = library.gas_unpack
        self._unpack.argtypes, self._unpack.restype = (_NUMBER, _ADDRESS), ctypes.c_int
        self._table = fp8_table()
        self._sgemm = _torch_sgemm()
        self._layouts: dict[tuple[str, int, int], _Layout] = {}

    def linear(
        self, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, form: str, group: int
    ) -> bool:
        """Write ``x @ decoded(weight).T`` into ``out`` for a few rows of ``x``, without a scratch."""
        if x.shape[0] > MAX_FEW_ROWS or not _is_for_us(out, x, weight, form, group):
            return False
        layout = self._layout(form, x.shape[1], group)
        x = _ordered(x, form, group)
        task = _task(out, x, weight)
        return not self._few(_CODES[form], ctypes.byref(layout), ctypes.byref(task))

    def linear_by_blocks(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        form: str,
        group: int,
        scratch: torch.Tensor,
    ) -> bool:
        """Do the same for any number of rows; ``scratch`` is a matrix as wide as ``x``."""
        room = scratch.shape[0] // _ROW_GROUP
        num_threads = max(1, min(torch.get_num_threads(), room))
        fewest = -(-weight.shape[0] // (_FEWEST_BLOCKS * num_threads))
        block_rows = min(scratch.shape[0] // num_threads, -(-fewest // _ROW_GROUP) * _ROW_GROUP)
        if self._sgemm is None or not _is_for_us(out, x, weight, form, group):
            return False
        assert scratch.is_contiguous() and scratch.shape[1] == x.shape[1], "a scratch as wide as x"
        layout = self._layout(form, x.shape[1], group)
        x = _ordered(x, form, group)
        task = _task(out, x, weight)
        return not self._many(
            _CODES[form], ctypes.byref(layout), ctypes.byref(task),
            scratch.data_ptr(), block_rows, num_threads, self._sgemm,
        )  # fmt: skip

    def decode(self, out: torch.Tensor, weight: torch.Tensor, form: str, group: int) -> bool:
        """Write the values of packed rows, of any form but ``int4``, into ``out``, ``[rows, columns]``."""
        if form not in (*LOW_BITS, *BLOCKS) or out.dim() != 2 or not out.is_contiguous():
            return False
        if not (_is_float32(out) and _is_rows(weight, out.shape[1], form, group)):
            return False
        if weight.shape[0] != out.shape[0]:
            return False
        layout = self._layout(form, out.shape[1], group)
        task = _task(out, out, weight)
        return not self._decode(_CODES[form], ctypes.byref(layout), ctypes.byref(task))

    def unpack(
        self,
        out: torch.Tensor,
        codes: torch.Tensor,
        zeros: torch.Tensor | int,
        scales: torch.Tensor,
        groups: torch.Tensor | None,
        packing: Packing,
    ) -> bool:
        """Write ``(code - zero) * scale`` of rows whose parts lie apart into ``out``, ``[rows, columns]``."""
        is_across = packing.kind in ("gptq", "awq")
        lines = out.t() if is_across else out
        is_ours = _is_float32(out) and lines.stride(1) == 1 and codes.stride(1) == 1
        each = WORD_BITS // packing.bits
        rest = {"awq": out.shape[0] % each, "gptq": out.shape[1] % each}.get(packing.kind, 0)
        if not is_ours or rest:
            return False
        num_groups = packing.num_groups(out.shape[1])
        factors = _factors(scales.expand(out.shape[0], num_groups), is_across=is_across)
        points = None if isinstance(zeros, int) else _factors(zeros, is_across=is_across)
        apart = _Apart(
            codes=codes.data_ptr(),
            stride=codes.stride(0) * codes.element_size(),
            bits=packing.bits,
            rows=out.shape[0],
            columns=out.shape[1],
            groups=num_groups,
            group=packing.group,
            zeros=None if points is None else points.data_ptr(),
            scales=factors.data_ptr(),
            middle=zeros if isinstance(zeros, int) else 0,
            order=None if groups is None else groups.data_ptr(),
            out=out.data_ptr(),
            out_stride=lines.stride(0),
            table=self._table.data_ptr(),
        )
        kind = _KINDS[packing.kind] + (packing.kind == "packed" and packing.bits == 8)
        return not self._unpack(kind, ctypes.byref(apart))

    def _layout(self, form: str, columns: int, group: int) -> _Layout:
        key = (form, columns, group)
        if key not in self._layouts:
            fields: dict[str, Any] = {"columns": columns, "group": group}
            if form in FORMS:
                parts = packed_parts(form, columns, group)
                fields["low_bits"] = LOW_BITS.get(form, 0)
                fields["low_bytes"] = parts.low_bytes
                fields["scales_offset"] = parts.scales_offset
                fields["steps_offset"] = parts.steps_offset or parts.minima_offset
            self._layouts[key] = _Layout(**fields)
        return self._layouts[key]


def _factors(factors: torch.Tensor, *, is_across: bool) -> torch.Tensor:
    """Return factors of ``[rows, groups]`` in the order of memory in which the library takes them."""
    return (factors.t() if is_across else factors).contiguous()


def _torch_sgemm() -> int | None:
    """Return the address of the product that torch itself calls: no other BLAS knows of torch's threads."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        function = ctypes.CDLL(str(path)).sgemm_
    except (OSError, AttributeError):
        return None
    return ctypes.cast(function, _ADDRESS).value


def _task(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> _Task:
    return _Task(
        x=x.data_ptr(),
        rows=x.shape[0],
        weight=weight.data_ptr(),
        outputs=weight.shape[0],
        row_stride=weight.stride(0) * weight.element_size(),
        out=out.data_ptr(),
        out_stride=out.stride(0),
    )


def _ordered(x: torch.Tensor, form: str, group: int) -> torch.Tensor:
    """Return ``x`` in the order in which values come: of ``int4`` the even columns of a group before the odd ones."""
    if form != "int4":
        return x.contiguous()
    pairs = x.reshape(x.shape[0], -1, group // 2, 2)
    return pairs.transpose(-1, -2).contiguous()


def _is_for_us(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, form: str, group: int
) -> bool:
    """Return whether everything is as the library takes it to be; what is not is refused, or done, by plain torch."""
    if form not in _CODES or x.dim() != 2 or x.shape[1] < 1:
        return False
    is_in_rows = out.shape[-1] == 1 or out.stride(-1) == 1
    return (
        _is_float32(x)
        and _is_float32(out)
        and out.shape == (x.shape[0], weight.shape[0])
        and is_in_rows
        # A row of outputs that is broadcast would be written by several.
        and (out.shape[0] == 1 or out.stride(0) >= out.shape[1])
        and max(x.shape[1], *out.shape, out.stride(0)) < 2**31
        and _is_rows(weight, x.shape[1], form, group)
    )


def _is_float32(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.device.type == "cpu"


def _is_rows(weight: torch.Tensor, columns: int, form: str, group: int) -> bool:
    is_packed = form in PACKED_FORMS
    return (
        weight.device.type == "cpu"
        and weight.dim() == 2
        and weight.dtype == (torch.uint8 if is_packed else torch.bfloat16)
        and weight.shape[1] == (row_bytes(form, columns, group) if is_packed else columns)
        and (weight.stride(1) == 1 or weight.shape[1] == 1)
    )


def install(path: Path) -> None:
    """Let all products with packed weights in this process use the library at ``path``.

    Raises:
        OSError: it is no library of this machine.
        AttributeError: it is another one.
    """
    format_ops.use_kernels(PackedKernels(path))
