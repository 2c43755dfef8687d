"""Ops on weights in their wire form: a linear layer, its tiles, and decoding. Plain torch, any device.

A weight arrives in fewer bytes than it is computed in. ``wire_linear`` decodes it in blocks of rows into a
scratch that stays in the caches and multiplies block by block, so no decoded weight is ever whole in memory; where
compiled ``Kernels`` are installed, they multiply few rows without any scratch, and decode.
Wire forms are ``bfloat16`` and ``float16``, plain matrices, and the packed ones of ``layout``. What differs
from group to group alone is taken out of the product where it can be: ``int4`` adds its minima by the sums of
each group of inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import torch

from gascompile.formats.blocks import decode_blocks, decode_bytes
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

PLAIN: Final = ("bfloat16", "float16", "float32")
"""Wire forms that are matrices of a dtype of torch's."""
_BLOCK_WEIGHTS = 1 << 20
"""Weights that are decoded at once, about: 4 MiB of fp32, which a cache keeps until the product reads them."""
_MANY_ROWS = 32
"""From so many rows of inputs on twice as many: the product takes longer than decoding, and threads that wait for
each other after every block cost more than what the cache saves. [Empirical]"""
_ROW_GROUP = 16


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


def wire_matrix(form: str, rows: int, columns: int, group: int) -> tuple[str, tuple[int, int]]:
    """Return dtype and shape of the matrix that a weight of ``rows x columns`` is on the wire."""
    if form in PLAIN:
        return form, (rows, columns)
    return "uint8", (rows, row_bytes(form, columns, group))


def linear_into(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, form: str, group: int
) -> None:
    """Write ``x @ decoded(weight).T`` into ``out``.

    Args:
        out: ``[m, rows]``, of any strides.
        x: ``[m, columns]``, in the dtype that is computed in.
        weight: the wire matrix of ``rows`` rows.
        form: its form.
        group: columns per scale in packed forms.
    """
    columns = x.shape[1]
    _check_width(weight, form, columns, group)
    kernels = _kernels.get(x.device.type)
    if kernels is not None and kernels.linear(out, x, weight, form, group):
        return
    scratch = x.new_empty((_block_rows(x.shape[0], columns, weight.shape[0]), columns))
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
    """Return wire rows, ``[..., row_bytes]`` or ``[..., columns]``, as values ``[..., columns]`` of ``dtype``.

    A value is computed in float32 and rounded once; ``plain`` keeps to plain torch, whatever is installed.
    """
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


def _block_rows(m: int, columns: int, rows: int) -> int:
    num_weights = _BLOCK_WEIGHTS * (2 if m >= _MANY_ROWS else 1)
    num_rows = max(num_weights // columns // _ROW_GROUP, 1) * _ROW_GROUP
    return min(num_rows, rows)


# ------------------------------------------------------------ what graphs call


def _linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, form: str, group: int
) -> torch.Tensor:
    return linear_tile(None, x, weight, bias, 0, weight.shape[0], form, group)


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
        weight: the wire rows of the layer's weight that belong to the tile.
        bias: the layer's whole bias, in any floating dtype.
        begin: first output feature of the tile.
        features: output features of the layer.
        form: the weight's wire form.
        group: columns per scale in packed forms.
    """
    if out is None:
        out = x.new_empty((*x.shape[:-1], features))
    if not out.numel():
        return out
    end = begin + weight.shape[0]
    part = out.view(-1, features)[:, begin:end]
    linear_into(part, x.reshape(-1, x.shape[-1]), weight, form, group)
    if bias is not None:
        part.add_(bias[begin:end])
    return out


def _linear_shape(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, form: str, group: int
) -> torch.Tensor:
    del bias, form, group
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _decode(
    rows: torch.Tensor, form: str, columns: int, group: int, dtype: torch.dtype
) -> torch.Tensor:
    return decoded(rows, form, columns, group, dtype)


def _decode_shape(
    rows: torch.Tensor, form: str, columns: int, group: int, dtype: torch.dtype
) -> torch.Tensor:
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


# ------------------------------------------------------------ what they need beside their results


def linear_workspace_bytes(x: torch.Tensor, weight: torch.Tensor, form: str, group: int) -> int:
    """Return at least what ``wire_linear`` allocates at once beside its result."""
    columns, itemsize = x.shape[-1], x.element_size()
    m = x.numel() // columns
    block = _block_rows(m, columns, weight.shape[0])
    size_bytes = block * columns * itemsize + _FEW_BYTES
    if not x.is_contiguous():
        size_bytes += m * columns * itemsize
    if form not in PACKED_FORMS:
        return size_bytes
    num_scales = block * -(-columns // group)
    if x.dtype != torch.float32:
        decoding_bytes = decode_workspace_bytes(block, columns, form, group)
        return size_bytes + decoding_bytes + 4 * block * columns
    if form != "int4":
        return size_bytes + decode_workspace_bytes(block, columns, form, group)
    # Scales in float32, and minima in both dtypes.
    size_bytes += num_scales * (4 + 2 + 4) + block * columns // 2
    size_bytes += m * columns * itemsize + m * (columns // group) * itemsize
    return size_bytes


def decode_workspace_bytes(
    num_rows: int, columns: int, form: str, group: int, dtype_bytes: int = 4
) -> int:
    """Return at least what decoding wire rows allocates at once beside its result."""
    if form not in PACKED_FORMS:
        return _FEW_BYTES
    if form in BLOCKS:
        plain_bytes = decode_bytes(num_rows, columns, form)
        return _FEW_BYTES + plain_bytes + (4 * num_rows * columns if dtype_bytes != 4 else 0)
    parts = packed_parts(form, columns, group)
    row_bytes = columns // 2 + parts.num_scales * (2 + 4)
    if form != "int4":
        # Codes twice, scales and steps in float32, lower bits as bytes and in float32.
        row_bytes = parts.num_scales + 2 + parts.num_steps * (4 * GROUPS_PER_STEP + 2 + 4)
        row_bytes += parts.low_bytes * (1 + 4)
    if dtype_bytes != 4:
        row_bytes += 4 * columns
    return _FEW_BYTES + num_rows * row_bytes


_FEW_BYTES = 1 << 10
"""Allocations of a few bytes: sizes are rounded up."""
