"""Values in files: what a model on the meta device is trained from, without ever standing whole in memory.

Its tensors get memory that nothing touches, so that traces see a model as any other, and the first plan of a
step takes even that away. Values go from the checkpoint's files through a small buffer to where the step
keeps what is out of memory, and come into memory as the plan says.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import nn

from gascompile.core.errors import CheckpointError, UnsupportedOpError
from gascompile.core.model_libraries import ignorable_weights, rebuild_buffers
from gascompile.core.sizes import format_size
from gascompile.core.sources import WeightSource
from gascompile.formats.dtypes import is_lossless
from gascompile.runtime.memory.persistent import Persistent
from gascompile.training.capture.unbacked_tensors import Outlines, become
from gascompile.training.state.aliasing import named_tensors
from gascompile.weights.checkpoint import Checkpoint, match_weights, open_checkpoint_of

Reader = Callable[[memoryview, int], None]
"""Fills memory with a tensor's bytes from an offset on; both are whole elements."""
_PART_ELEMENTS = 1 << 20
"""Elements of another dtype that are read at a time."""


class FileValues:
    """Which tensors of a model have their values in files, and where. The model itself changes in ``enter``."""

    def __init__(self, model: nn.Module, path: str | os.PathLike[str]) -> None:
        """Find all of the model's tensors in the checkpoint; only headers are read.

        Args:
            path: a .safetensors file, a sharded directory or a Hugging Face directory.

        Raises:
            CheckpointError: the checkpoint cannot be read, or is of another model: names what is missing, extra
                or of another shape or dtype. A buffer has neither a value nor a place in the checkpoint.
            UnsupportedOpError: tensors of the model share memory.
        """
        self.where = str(path)
        canonical, self._tensors = named_tensors(model)
        _require_apart(self._tensors)
        self.sources = self._found(model, canonical, open_checkpoint_of(model, Path(path)))
        rest = [name for name in self._tensors if name not in self.sources]
        lost = [name for name in rest if self._tensors[name].is_meta]
        rebuilt = rebuild_buffers(model) if lost else {}
        self._rebuilt = {name: rebuilt[name] for name in lost if name in rebuilt}
        if missing := [name for name in lost if name not in rebuilt]:
            raise CheckpointError(
                f"the buffer '{missing[0]}' is on the meta device and not part of {self.where}, so its values are "
                f"lost (as are those of {len(missing) - 1} others); build the model with real buffers "
                "(accelerate.init_empty_weights(include_buffers=False)) or assign it before compile_step"
            )
        self._outlines = Outlines({name: self._tensors[name] for name in self.sources})

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the model's tensors that have their values in files."""
        return self._outlines.tensors

    def enter(self) -> None:
        """Give the tensors shapes on the CPU, in memory that is promised and not taken; idempotent."""
        for name, value in self._rebuilt.items():
            if self._tensors[name].is_meta:
                become(self._tensors[name], value)
        self._outlines.enter()

    def leave(self, layouts: Mapping[str, torch.Tensor] | None = None) -> None:
        """Let the tensors be on the meta device again, but for buffers that are in no file; idempotent.

        Args:
            layouts: tensors that have their shapes and strides, by name; they themselves, if ``None``.
        """
        self._outlines.leave(layouts)

    def fill(self, persistent: Persistent) -> None:
        """Let all values be in their slots; closes ``persistent`` where that fails.

        Raises:
            CheckpointError: a file cannot be read.
            StorageError: the slots' file cannot be written.
        """
        try:
            for name in self.sources:
                if persistent.tensors[name].is_contiguous():
                    persistent.put(name, self.reader(name))
                else:
                    persistent.assign(name, self._whole(name))
        except BaseException:
            persistent.close()
            raise

    def stays_out(
        self, tensors: Mapping[str, torch.Tensor], persistent: Persistent, available_bytes: int
    ) -> bool:
        """Return whether memory is too small for a model; it is then on the meta device again.

        Args:
            tensors: the model's, emptied, by their names in ``persistent``; those that are in no file come back.
        """
        away_bytes = sum(persistent.sizes[name] for name in tensors if persistent.is_away(name))
        if away_bytes <= available_bytes:
            return False
        warnings.warn(
            f"the model's {format_size(away_bytes)} do not fit the {format_size(available_bytes)} of memory that is "
            "free: it stays on the meta device, and the optimizer without state; use save before close to keep both",
            stacklevel=4,
        )
        for name in tensors.keys() - self.sources.keys():
            tensors[name].data = persistent.taken(name)
        self.leave(persistent.tensors)
        return True

    def reader(self, name: str) -> Reader:
        """Return what reads the values of a tensor, in its own dtype, row by row.

        Raises:
            CheckpointError: at a call: the file cannot be read, or has become shorter.
        """
        source = self.sources[name]
        wanted, stored = self._tensors[name].dtype, getattr(torch, source.dtype)

        def plain(target: memoryview, offset: int) -> None:
            _read(source, target, offset, self.where)

        def converted(target: memoryview, offset: int) -> None:
            part = torch.empty(_PART_ELEMENTS, dtype=stored)
            whole = torch.frombuffer(target, dtype=wanted)
            first = offset // wanted.itemsize
            for begin in range(0, len(whole), _PART_ELEMENTS):
                piece = whole[begin : begin + _PART_ELEMENTS]
                raw = part[: len(piece)].view(torch.uint8).numpy().data
                _read(source, raw, (first + begin) * stored.itemsize, self.where)
                piece.copy_(part[: len(piece)])

        return plain if wanted == stored else converted

    def _found(
        self, model: nn.Module, canonical: Mapping[str, str], checkpoint: Checkpoint
    ) -> dict[str, WeightSource]:
        aliases: dict[str, tuple[str, ...]] = {}
        for name, first in canonical.items():
            aliases[first] = (*aliases.get(first, ()), name)
        listed = model.state_dict(keep_vars=True).keys() | checkpoint.sources.keys()
        expected = {
            name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            for name, tensor in self._tensors.items()
            if any(alias in listed for alias in aliases[name])
        }
        return match_weights(
            expected,
            checkpoint,
            names=aliases,
            ignorable=ignorable_weights(model, checkpoint.sources),
            where=self.where,
            accepts=is_lossless,
        )

    def _whole(self, name: str) -> torch.Tensor:
        found = torch.empty(self.sources[name].shape, dtype=self._tensors[name].dtype)
        if found.numel():
            self.reader(name)(found.view(-1).view(torch.uint8).numpy().data, 0)
        return found


def _require_apart(tensors: Mapping[str, torch.Tensor]) -> None:
    owners: dict[int, str] = {}
    for name, tensor in tensors.items():
        owner = owners.setdefault(tensor.untyped_storage()._cdata, name)
        if owner != name and tensor.numel():
            raise UnsupportedOpError(
                f"'{owner}' and '{name}' share memory, which values from a checkpoint cannot keep; tie them by "
                "assigning the same nn.Parameter, or compile the loaded model without checkpoint="
            )


def _read(source: WeightSource, target: memoryview, offset: int, where: str) -> None:
    """Fill ``target`` with a tensor's bytes in its files from ``offset`` on."""
    begin = 0
    for extent in source.extents:
        low, high = max(offset, begin), min(offset + len(target), begin + extent.size_bytes)
        if low < high:
            part = target[low - offset : high - offset]
            _read_file(extent.path, part, extent.offset + low - begin, source.name, where)
        begin += extent.size_bytes


def _read_file(path: str, target: memoryview, offset: int, name: str, where: str) -> None:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            done = 0
            while done < len(target):
                got = os.preadv(file, [target[done:]], offset + done)
                if not got:
                    raise CheckpointError(
                        f"{path} has become shorter: '{name}' ends after {offset + done} bytes; put the file of "
                        f"{where} back"
                    )
                done += got
            # It is read once: its pages would only push others out.
            os.posix_fadvise(file, offset, len(target), os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)
    except OSError as error:
        raise CheckpointError(
            f"cannot read '{name}' from {where}: {error.strerror or error}"
        ) from error
