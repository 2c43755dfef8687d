"""Packed values: frozen weights that a step keeps, moves and reads as the bytes that a checkpoint has of them.

Whoever asks for such a weight gets its values, in the dtype and the shape that the model has; none can be changed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from gascompile.core.errors import CheckpointError, UnsupportedOpError
from gascompile.core.sources import WeightSource
from gascompile.formats.layout import group_of, is_read_packed
from gascompile.formats.ops import FormSpec, decoded, transfer_matrix
from gascompile.runtime.memory.storages import without_memory
from gascompile.training.capture.unbacked_tensors import untouched


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedValue:
    """One weight as it lies in files, and as the model has it."""

    name: str
    form: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    heads: int = 0
    """Of ``WeightSource``: heads whose rows lie pair by pair."""

    @property
    def spec(self) -> FormSpec:
        """Return its form, as programs have it."""
        return FormSpec(stored=self.form, wire=self.form, interleaved_heads=self.heads)

    @property
    def size_bytes(self) -> int:
        """Bytes of the values."""
        return math.prod(self.shape) * self.dtype.itemsize

    def outline(self) -> torch.Tensor:
        """Return a tensor of as many bytes as files have, in memory that nobody has touched."""
        dtype, shape = transfer_matrix(self.form, self.shape[0], self.shape[1], group_of(self.form))
        with untouched():
            return torch.empty(shape, dtype=getattr(torch, dtype))

    def like(self) -> torch.Tensor:
        """Return a tensor that has the layout of the values alone."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def without_memory(self) -> torch.Tensor:
        """Return a tensor of the host that has the layout of the values, and no memory for them."""
        return without_memory(self.like())

    def values(self, kept: torch.Tensor) -> torch.Tensor:
        """Return the values of the bytes of files."""
        group = group_of(self.form)
        values = decoded(kept, self.form, self.shape[1], group, self.dtype)
        if self.heads:
            pairs = values.view(self.heads, -1, 2, self.shape[1])
            values = pairs.transpose(1, 2).reshape(self.shape)
        return values

    def require_same(self, kept: torch.Tensor, value: torch.Tensor) -> None:
        """Refuse another value than the one that files have.

        Raises:
            UnsupportedOpError: it is another one.
        """
        own, given = self.values(kept), value.detach().to(kept.device, self.dtype)
        is_same = own.shape == given.shape and bool(
            ((own == given) | (own.isnan() & given.isnan())).all()
        )
        if not is_same:
            raise UnsupportedOpError(
                f"'{self.name}' lies packed in its file ({self.form}) and cannot get other values; train from a "
                "checkpoint that is not quantised"
            )


def packed_values(
    sources: Mapping[str, WeightSource], tensors: Mapping[str, torch.Tensor], where: str
) -> dict[str, PackedValue]:
    """Return the weights that are kept packed.

    Args:
        sources: where values lie, by name.
        tensors: of the model.
        where: what errors call the checkpoint.

    Raises:
        UnsupportedOpError: one of them is trained, or laid out otherwise than its file has it.
    """
    packed = {}
    for name, source in sources.items():
        tensor = tensors[name]
        if not is_read_packed(source.dtype):
            if source.interleaved_heads:
                raise CheckpointError(
                    f"the rows of '{name}' lie in another order in {where} than the model has them; convert the "
                    "checkpoint to safetensors"
                )
            continue
        if tensor.requires_grad or not isinstance(tensor, torch.nn.Parameter):
            raise UnsupportedOpError(
                f"'{name}' lies packed in {where} ({source.dtype}), and what is packed cannot be trained: freeze the "
                "base (model.requires_grad_(False)) and train adapters, or use a checkpoint that is not quantised"
            )
        if not tensor.is_contiguous():
            raise UnsupportedOpError(
                f"'{name}' lies packed in {where} and has strides of its own in the model; leave it contiguous"
            )
        packed[name] = PackedValue(
            name=name,
            form=source.dtype,
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            heads=source.interleaved_heads,
        )
    return packed
