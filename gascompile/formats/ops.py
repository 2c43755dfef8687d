"""Ops on weights in their transfer format: a linear layer, its tiles, and decoding. Plain torch, any device.

A weight arrives in fewer bytes than it is computed in. ``wire_linear`` decodes it in blocks of rows into a
scratch that stays in the caches and multiplies block by block, so no decoded weight is ever whole in memory; where
compiled ``Kernels`` are installed, they multiply few rows without any scratch, and decode.
Transfer formats are ``bfloat16`` and ``float16``, plain matrices, and the packed ones of ``layout``. What differs
from group to group alone is taken out of the product where it can be: ``int4`` adds its minima by the sums of
each group of inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import torch

from gascompile.formats.blocks import decode_blocks
from gascompile.formats.layout import (
    BLOCKS,
    GROUPS_PER_STEP,
    INT4_LARGEST,
    LARGEST_CODE,
    LOW_BITS,
    PACKED_FORMS,
    group_of,
    packed_parts,
    row_bytes,
)
from gascompile.formats.packings import Packing, packing_of, rows_of
from gascompile.formats.unpack import Unpack, unpacked

PLAIN: Final = ("bfloat16", "float16", "float32")
"""Transfer formats that are matrices of a dtype of torch's."""
_BLOCK_WEIGHTS = 1 << 20
"""Weights that are decoded at once, about: 4 MiB of fp32, which a cache keeps until the product reads them."""
_MANY_ROWS = 32
"""From so many rows of inputs on twice as many: the product takes longer than decoding, and threads that wait for
each other after every block cost more than what the cache saves. [Empirical]"""
_ROW_GROUP = 16  # rows that compiled kernels decode together


class Kernels(Protocol):
    """Compiled code for what is plain torch here; each says whether the shapes and dtypes were for it."""

    def linear(
        self, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, form: str, group: int
    ) -> bool:
        """Do what ``linear_into`` does, for few rows of inputs."""
        ...

    def linear_by_blocks(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        form: str,
        group: int,
        scratch: torch.Tensor,
    ) -> bool:
        """Do what ``linear_into`` does, with a scratch of some rows as wide as ``x``."""
        ...

    def decode(self, out: torch.Tensor, weight: torch.Tensor, form: str, group: int) -> bool:
        """Write the values of packed rows, of any form but ``int4``, into ``out``, a matrix."""
        ...

    def unpack(
        self,
        out: torch.Tensor,
        codes: torch.Tensor,
        zeros: torch.Tensor | int,
        scales: torch.Tensor,
        groups: torch.Tensor | None,
        packing: Packing,
    ) -> bool:
        """Write the values of rows whose parts lie apart; see ``unpack.Unpack``."""
        ...


_kernels: dict[str, Kernels] = {}


def use_kernels(kernels: Kernels | None, *, device: str = "cpu") -> None:
    """Let ``kernels`` compute what they can in this process, in place of those before; ``None`` is plain torch.

    Args:
        kernels: compiled code.
        device: of the tensors that they are for.
    """
    if kernels is None:
        _kernels.pop(device, None)
    else:
        _kernels[device] = kernels


def kernels_for(device: str = "cpu") -> Kernels | None:
    """Return the compiled code that computes what it can on a device, if there is any."""
    return _kernels.get(device)


@dataclass(frozen=True, slots=True, kw_only=True)
class FormSpec:
    """How one weight lies in its file and how it moves."""

    stored: str
    wire: str
    interleaved_heads: int = 0
    """As ``WeightSource`` has it."""

    @property
    def group(self) -> int:
        """Columns that share a scale or a block in a packed form; 0 in others."""
        return group_of(self.wire)


def transfer_matrix(form: str, rows: int, columns: int, group: int) -> tuple[str, tuple[int, ...]]:
    """Return dtype and shape of what a weight of ``rows x columns`` moves as: bytes alone where it is whole."""
    if form in PLAIN:
        return form, (rows, columns)
    if packing := packing_of(form):
        return "uint8", (packing.size_bytes(rows, columns),)
    return "uint8", (rows, row_bytes(form, columns, group))


def transfer_rows(weight: torch.Tensor, form: str, columns: int) -> int:
    """Return how many rows a weight as it moves has."""
    return weight.shape[0] if weight.dim() > 1 else rows_of(form, columns, weight.shape[0])


def linear_into(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, form: str, group: int
) -> None:
    """Write ``x @ decoded(weight).T`` into ``out``.

    Args:
        out: ``[m, rows]``, of any strides.
        x: ``[m, columns]``, in the dtype that is computed in.
        weight: the matrix, in its transfer format, of ``rows`` rows.
        form: its form.
        group: columns per scale in packed forms.
    """
    columns = x.shape[1]
    if packing_of(form) is not None:
        _whole_into(out, x, weight, form)
        return
    _check_width(weight, form, columns, group)
    kernels = _kernels.get(x.device.type)
    if kernels is not None and kernels.linear(out, x, weight, form, group):
        return
    scratch = x.new_empty((block_rows(x.shape[0], columns, weight.shape[0]), columns))
    if kernels is not None and kernels.linear_by_blocks(out, x, weight, form, group, scratch):
        return
    if form == "int4" and x.dtype == torch.float32:
        _int4_into(out, x, weight, scratch, group)
        return
    for begin in range(0, weight.shape[0], scratch.shape[0]):
        rows = weight[begin : begin + scratch.shape[0]]
        block, part = scratch[: rows.shape[0]], out[:, begin : begin + rows.shape[0]]
        if form not in PACKED_FORMS:
            block.copy_(rows)
        elif x.dtype == torch.float32:
            _values_into(block, rows, form, group)
        else:
            block.copy_(decoded(rows, form, columns, group, torch.float32))
        torch.mm(x, block.t(), out=part)


def _whole_into(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, form: str) -> None:
    """Multiply by a weight whose parts lie apart, some of its rows after the other."""
    columns = x.shape[1]
    step = block_rows(x.shape[0], columns, transfer_rows(weight, form, columns))
    # What is multiplied in less than float32 lies row by row: oneDNN would copy it so.
    narrow = None if x.dtype == torch.float32 else x.new_empty((step, columns))
    for begin, end, values in unpacked(weight, form, columns, step, _native(weight)):
        # In two steps: torch is slow to convert and to transpose at once.
        block = values if narrow is None else narrow[: end - begin].copy_(values.to(x.dtype))
        torch.mm(x, block.t(), out=out[:, begin:end])


def _native(weight: torch.Tensor) -> Unpack | None:
    kernels = _kernels.get(weight.device.type)
    return kernels.unpack if kernels is not None else None


def _values_into(out: torch.Tensor, rows: torch.Tensor, form: str, group: int) -> None:
    """Write the values of packed rows, but of ``int4``, into ``out``, ``[..., columns]`` in float32."""
    kernels = _kernels.get(out.device.type)
    if kernels is None or not kernels.decode(out, rows, form, group):
        _plain_values_into(out, rows, form, group)


def _plain_values_into(out: torch.Tensor, rows: torch.Tensor, form: str, group: int) -> None:
    if form in BLOCKS:
        decode_blocks(out, rows, form)
        return
    columns, low_bits = out.shape[-1], LOW_BITS[form]
    parts = packed_parts(form, columns, group)
    out.copy_(rows[..., :columns].view(torch.int8))
    if low_bits:
        out.mul_(1 << low_bits)
        low = rows[..., columns : columns + parts.low_bytes]
        for place, begin in enumerate(range(0, columns, parts.low_bytes)):
            part = out[..., begin : begin + parts.low_bytes]
            bits = torch.bitwise_right_shift(low[..., : part.shape[-1]], place * low_bits)
            part.add_(bits.bitwise_and_((1 << low_bits) - 1))
    scales = _scales(rows, form, columns, group)
    whole = columns // group
    if whole:
        groups = out[..., : whole * group].unflatten(-1, (whole, group))
        groups.mul_(scales[..., :whole].unsqueeze(-1))
    if columns % group:
        out[..., whole * group :].mul_(scales[..., whole:])


def _int4_into(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scratch: torch.Tensor, group: int
) -> None:
    """Multiply without bringing the two halves of a byte back in order: the inputs are put in theirs."""
    m, columns = x.shape
    half, num_groups = columns // 2, columns // group
    sums = x.reshape(m, num_groups, group).sum(-1)
    x = x.reshape(m, half, 2).transpose(1, 2).reshape(m, columns)
    nibbles = weight.new_empty((scratch.shape[0], half))
    for begin in range(0, weight.shape[0], scratch.shape[0]):
        rows = weight[begin : begin + scratch.shape[0]]
        num_rows = rows.shape[0]
        block, part = scratch[:num_rows], out[:, begin : begin + num_rows]
        packed, unpacked = rows[:, :half], nibbles[:num_rows]
        torch.bitwise_and(packed, INT4_LARGEST, out=unpacked)
        block[:, :half].copy_(unpacked)
        torch.bitwise_right_shift(packed, 4, out=unpacked)
        block[:, half:].copy_(unpacked)
        scales = _scales(rows, "int4", columns, group).view(num_rows, 1, num_groups, 1)
        block.view(num_rows, 2, num_groups, group // 2).mul_(scales)
        torch.mm(x, block.t(), out=part)
        part.addmm_(sums, _minima(rows, columns, group).t())


def decoded(
    rows: torch.Tensor,
    form: str,
    columns: int,
    group: int,
    dtype: torch.dtype,
    *,
    plain: bool = False,
) -> torch.Tensor:
    """Return rows as they move, ``[..., row_bytes]`` or ``[..., columns]``, as values ``[..., columns]`` of ``dtype``.

    A value is computed in float32 and rounded once; ``plain`` keeps to plain torch, whatever is installed.
    """
    if packing_of(form) is not None:
        out = rows.new_empty((transfer_rows(rows, form, columns), columns), dtype=dtype)
        step, native = block_rows(1, columns, len(out)), None if plain else _native(rows)
        for begin, end, block in unpacked(rows, form, columns, step, native):
            out[begin:end].copy_(block.to(dtype))
        return out
    if form not in PACKED_FORMS:
        return rows.to(dtype)
    _check_width(rows, form, columns, group)
    if form != "int4":
        values = torch.empty((*rows.shape[:-1], columns), device=rows.device)
        (_plain_values_into if plain else _values_into)(values, rows, form, group)
        return values.to(dtype)
    num_groups = columns // group
    packed = rows[..., : columns // 2]
    values = torch.empty((*rows.shape[:-1], columns // 2, 2), device=rows.device)
    values[..., 0].copy_(packed & INT4_LARGEST)
    values[..., 1].copy_(packed >> 4)
    values = values.view(*rows.shape[:-1], num_groups, group)
    values.mul_(_scales(rows, form, columns, group).unsqueeze(-1))
    values.add_(_minima(rows, columns, group).unsqueeze(-1))
    return values.view(*rows.shape[:-1], columns).to(dtype)


def _check_width(rows: torch.Tensor, form: str, columns: int, group: int) -> None:
    """Refuse rows of another layout: earlier versions kept other scales."""
    if form in PACKED_FORMS and rows.shape[-1] != row_bytes(form, columns, group):
        raise ValueError(
            f"{columns} columns as {form} in groups of {group} take {row_bytes(form, columns, group)} bytes a row, "
            f"and these rows have {rows.shape[-1]}: they were packed by another version; compile the model again"
        )


def _scales(rows: torch.Tensor, form: str, columns: int, group: int) -> torch.Tensor:
    """Return the scales of packed rows in float32, ``[..., number of scales]``."""
    parts = packed_parts(form, columns, group)
    if parts.steps_offset is None:
        return _field(rows, parts.scales_offset, parts.num_scales, torch.float16)
    pairs = rows[..., parts.scales_offset : parts.scales_offset + -(-parts.num_scales // 2)]
    scales = torch.empty(
        (*rows.shape[:-1], parts.num_steps * GROUPS_PER_STEP // 2, 2), device=rows.device
    )
    scales[..., : pairs.shape[-1], 0].copy_(pairs & LARGEST_CODE)
    scales[..., : pairs.shape[-1], 1].copy_(pairs >> 4)
    steps = _field(rows, parts.steps_offset, parts.num_steps, torch.bfloat16)
    scales = scales.view(*rows.shape[:-1], parts.num_steps, GROUPS_PER_STEP)
    return scales.mul_(steps.unsqueeze(-1)).flatten(-2)[..., : parts.num_scales]


def _minima(rows: torch.Tensor, columns: int, group: int) -> torch.Tensor:
    parts = packed_parts("int4", columns, group)
    assert parts.minima_offset is not None, "int4 has minima"
    return _field(rows, parts.minima_offset, parts.num_scales, torch.float16)


def _field(rows: torch.Tensor, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    raw = rows[..., offset : offset + count * dtype.itemsize]
    return raw.contiguous().view(dtype).float()


def block_rows(m: int, columns: int, rows: int) -> int:
    """Return how many rows are decoded at once for ``m`` rows of inputs."""
    num_weights = _BLOCK_WEIGHTS * (2 if m >= _MANY_ROWS else 1)
    num_rows = max(num_weights // columns // _ROW_GROUP, 1) * _ROW_GROUP
    return min(num_rows, rows)


# ------------------------------------------------------------ what graphs call


def _linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, form: str, group: int
) -> torch.Tensor:
    features = transfer_rows(weight, form, x.shape[-1])
    return linear_tile(None, x, weight, bias, 0, features, form, group)


def linear_tile(
    out: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    begin: int,
    features: int,
    form: str,
    group: int,
) -> torch.Tensor:
    """Compute the output features of a linear layer that begin at ``begin``, in place, and return all of them.

    Args:
        out: what the tiles before have written; ``None`` makes room for all ``features``.
        x: the layer's input.
        weight: the rows in a transfer format of the layer's weight that belong to the tile.
        bias: the layer's whole bias, in any floating dtype.
        begin: first output feature of the tile.
        features: output features of the layer.
        form: the weight's transfer format.
        group: columns per scale in packed forms.
    """
    if out is None:
        out = x.new_empty((*x.shape[:-1], features))
    if not out.numel():
        return out
    end = begin + transfer_rows(weight, form, x.shape[-1])
    part = out.view(-1, features)[:, begin:end]
    linear_into(part, x.reshape(-1, x.shape[-1]), weight, form, group)
    if bias is not None:
        part.add_(bias[begin:end])
    return out


def _linear_shape(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, form: str, group: int
) -> torch.Tensor:
    del bias, group
    return x.new_empty((*x.shape[:-1], transfer_rows(weight, form, x.shape[-1])))


def _decode(
    rows: torch.Tensor, form: str, columns: int, group: int, dtype: torch.dtype
) -> torch.Tensor:
    return decoded(rows, form, columns, group, dtype)


def _decode_shape(
    rows: torch.Tensor, form: str, columns: int, group: int, dtype: torch.dtype
) -> torch.Tensor:
    if packing_of(form) is not None:
        return rows.new_empty((transfer_rows(rows, form, columns), columns), dtype=dtype)
    return rows.new_empty(
        (*rows.shape[:-1], columns) if form in PACKED_FORMS else rows.shape, dtype=dtype
    )


_LIBRARY = torch.library.Library("gascompile", "FRAGMENT")
_LIBRARY.define("wire_linear(Tensor x, Tensor weight, Tensor? bias, str form, int group) -> Tensor")
_LIBRARY.define(
    "wire_decode(Tensor rows, str form, int columns, int group, ScalarType dtype) -> Tensor"
)
_LIBRARY.impl("wire_linear", _linear, "CompositeExplicitAutograd")
_LIBRARY.impl("wire_decode", _decode, "CompositeExplicitAutograd")
# For fake tensors, too: `register_fake` would look for its caller among all modules of the process.
_LIBRARY.impl("wire_linear", _linear_shape, "Meta")
_LIBRARY.impl("wire_decode", _decode_shape, "Meta")

LINEAR: Final[torch._ops.OpOverload] = torch.ops.gascompile.wire_linear.default
DECODE: Final[torch._ops.OpOverload] = torch.ops.gascompile.wire_decode.default
