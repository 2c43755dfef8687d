"""Values in files: what a model on the meta device is trained from, without ever standing whole in memory.

Its tensors get memory that nothing touches, so that traces see a model as any other, and the first plan of a
step takes even that away. Values come into memory as the plan says: those that steps do not change from the
checkpoint's files; others go once, through a small buffer, to where the step keeps what is out of memory.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import nn

from gascompile.capture.load_hooks import require_no_load_hooks
from gascompile.core.errors import CheckpointError, StorageError, UnsupportedOpError
from gascompile.core.model_libraries import ignorable_weights, rebuild_buffers
from gascompile.core.sizes import format_size
from gascompile.core.sources import WeightSource
from gascompile.formats.dtypes import is_lossless
from gascompile.runtime.memory.persistent import Persistent
from gascompile.runtime.memory.source_slots import SourceSlots
from gascompile.runtime.transfer.files import SourceFile, SourceFiles
from gascompile.training.capture.unbacked_tensors import Outlines, become
from gascompile.training.state.aliasing import named_tensors
from gascompile.training.state.named_values import NamedValues
from gascompile.training.state.packed_values import packed_values
from gascompile.weights.checkpoint import (
    Checkpoint,
    has_own_values,
    open_checkpoint_of,
)
from gascompile.weights.matching import aliases_of, match_weights

Reader = Callable[[memoryview, int], None]
"""Fills memory with a tensor's bytes from an offset on; both are whole elements."""
_PART_ELEMENTS = 1 << 20
"""Elements of another dtype that are read at a time."""
_PIECE_BYTES = 1 << 18
"""What is in smaller pieces, as merged rows are, is copied once in the place of many small reads per step."""


class FileValues:
    """Which tensors of a model have their values in files, and where. The model itself changes in ``enter``."""

    def __init__(
        self, model: nn.Module, path: str | os.PathLike[str], store: Path | None = None
    ) -> None:
        """Find all of the model's tensors in the checkpoint; only headers are read.

        Args:
            path: a .safetensors, .gguf, .bin or .pt file, a sharded directory or a Hugging Face directory.
            store: folder of weights in the cache, in which it is noted which tied weights are the same.

        Raises:
            CheckpointError: the checkpoint cannot be read, or is of another model: names what is missing, extra
                or of another shape or dtype; tied weights differ in it. A buffer has neither a
                value nor a place in the checkpoint. The model has code of its own for loading weights.
            UnsupportedOpError: tensors of the model share memory; one that is packed is trained.
        """
        require_no_load_hooks(model)
        self.where = str(path)
        canonical, self._tensors = named_tensors(model)
        _require_apart(self._tensors)
        checkpoint = open_checkpoint_of(model, Path(path))
        self.stamps = checkpoint.stamps
        self.sources = self._matched(model, canonical, checkpoint, store)
        self.packed = packed_values(self.sources, self._tensors, self.where)
        """Those that are kept as their files have them, by name."""
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

    def in_place(
        self, tensors: Mapping[str, torch.Tensor], changing: Collection[str]
    ) -> SourceSlots:
        """Return the values that steps read where they lie.

        Args:
            tensors: have the layouts in which steps keep the values.
            changing: names of those that steps change.

        Raises:
            CheckpointError: a file is missing, or has changed since its header was read.
            UnsupportedOpError: steps change what is packed.
        """
        self.require_frozen(changing)
        lying = {
            name: source
            for name, source in self.sources.items()
            if name in self.packed
            or (name in tensors and name not in changing and _lies_as_kept(source, tensors[name]))
        }
        try:
            return SourceSlots(lying, self.stamps)
        except StorageError as error:
            raise CheckpointError(str(error)) from error

    def require_frozen(self, changing: Collection[str]) -> None:
        """Refuse steps that change what is packed; raises ``UnsupportedOpError``."""
        if changed := sorted(self.packed.keys() & changing):
            raise UnsupportedOpError(
                f"'{changed[0]}' lies packed in {self.where}, and steps would change it: leave it frozen, or train "
                "from a checkpoint that is not quantised"
            )

    def fill(
        self,
        persistent: Persistent,
        assign: Callable[[str, torch.Tensor], object],
        elsewhere: Collection[str] = (),
    ) -> None:
        """Let the values that cannot be read in place be in slots; closes ``persistent`` where that fails.

        Args:
            persistent: has the slots.
            assign: takes the whole value of what has none of its own there.
            elsewhere: what this process keeps nothing of.

        Raises:
            CheckpointError: a file cannot be read, or has changed since its header was read.
            StorageError: the slots' file cannot be written.
        """
        own = self.sources.keys() - set(elsewhere)
        rest = [n for n in self.sources if n in own and not persistent.is_in_place(n)]
        try:
            with self._opened(rest) as files:
                for name in rest:
                    if name not in persistent.tensors:
                        assign(name, self._whole(name, files))
                    elif persistent.tensors[name].is_contiguous():
                        persistent.put(name, self._reader(name, files))
                    else:
                        persistent.assign(name, self._whole(name, files))
        except BaseException:
            persistent.close()
            raise

    @contextmanager
    def _opened(self, names: Iterable[str]) -> Iterator[SourceFiles]:
        """Open the files of some values, which are the same at the end as when their headers were read."""
        paths = {extent.path for name in names for extent in self.sources[name].extents}
        stamps = [stamp for stamp in self.stamps if stamp.path in paths]
        with ExitStack() as stack:
            try:
                files = SourceFiles(paths, stamps)
                stack.callback(files.close)
            except StorageError as error:
                raise CheckpointError(str(error)) from error
            yield files
            try:
                files.recheck()
            except StorageError as error:
                raise CheckpointError(str(error)) from error

    def stays_out(
        self,
        tensors: Mapping[str, torch.Tensor],
        values: NamedValues,
        available_bytes: int,
        shut: Callable[[], None],
    ) -> bool:
        """Return whether memory is too small for a model; it is then on the meta device again.

        Args:
            tensors: the model's own, emptied, by their names in ``persistent``; those that are in no file come back.
            values: of the step.
            available_bytes: of memory.
            shut: lets the model's tensors be its own again.
        """
        persistent, divided = values.persistent, values.divided
        away = [name for name in tensors if persistent.is_away(name)]
        away_bytes = sum(
            self.packed[name].size_bytes if name in self.packed else persistent.sizes[name]
            for name in away
        )
        away_bytes += sum(
            outline.numel() * outline.itemsize
            for name, outline in divided.items()
            if name not in values.spread
        )
        if not values.agreed(away_bytes > available_bytes, "whether a model stays out of memory"):
            return False
        warnings.warn(
            f"the model's {format_size(away_bytes)} do not fit the {format_size(available_bytes)} of memory that is "
            "free: it stays on the meta device, and the optimizer without state; use save before close to keep both",
            stacklevel=4,
        )
        for name in tensors.keys() - self.sources.keys():
            tensors[name].data = persistent.taken(name)
        shut()
        packed = {name: value.like() for name, value in self.packed.items()}
        self.leave({**persistent.tensors, **divided, **packed})
        return True

    def _reader(self, name: str, files: SourceFiles) -> Reader:
        """Return what reads the values of a tensor, in its own dtype, row by row."""
        source = self.sources[name]
        wanted, stored = self._tensors[name].dtype, getattr(torch, source.dtype)

        def plain(target: memoryview, offset: int) -> None:
            _read(source, files, target, offset)

        def converted(target: memoryview, offset: int) -> None:
            part = torch.empty(_PART_ELEMENTS, dtype=stored)
            whole = torch.frombuffer(target, dtype=wanted)
            first = offset // wanted.itemsize
            for begin in range(0, len(whole), _PART_ELEMENTS):
                piece = whole[begin : begin + _PART_ELEMENTS]
                raw = part[: len(piece)].view(torch.uint8).numpy().data
                _read(source, files, raw, (first + begin) * stored.itemsize)
                piece.copy_(part[: len(piece)])

        return plain if wanted == stored else converted

    def _matched(
        self,
        model: nn.Module,
        canonical: Mapping[str, str],
        checkpoint: Checkpoint,
        store: Path | None,
    ) -> dict[str, WeightSource]:
        aliases = aliases_of(canonical)
        needed = model.state_dict(keep_vars=True).keys() - has_own_values(model)
        listed = needed | checkpoint.sources.keys()
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
            store=store,
        )

    def _whole(self, name: str, files: SourceFiles) -> torch.Tensor:
        values = torch.empty(self.sources[name].shape, dtype=self._tensors[name].dtype)
        if values.numel():
            self._reader(name, files)(values.view(-1).view(torch.uint8).numpy().data, 0)
        return values


def _lies_as_kept(source: WeightSource, tensor: torch.Tensor) -> bool:
    """Return whether the bytes in files are those of the tensor's memory, in pieces that are worth a read."""
    pieces_bytes = _PIECE_BYTES * (len(source.extents) - 1)
    return (
        str(tensor.dtype) == f"torch.{source.dtype}"
        and tensor.is_contiguous()
        and 0 < source.size_bytes == tensor.untyped_storage().nbytes()
        and pieces_bytes < source.size_bytes
    )


def _require_apart(tensors: Mapping[str, torch.Tensor]) -> None:
    owners: dict[int, str] = {}
    for name, tensor in tensors.items():
        owner = owners.setdefault(tensor.untyped_storage()._cdata, name)
        if owner != name and tensor.numel():
            raise UnsupportedOpError(
                f"'{owner}' and '{name}' share memory, which values from a checkpoint cannot keep; tie them by "
                "assigning the same nn.Parameter, or compile the loaded model without checkpoint="
            )


def _read(source: WeightSource, files: SourceFiles, target: memoryview, offset: int) -> None:
    """Fill ``target`` with a tensor's bytes in its files from ``offset`` on."""
    begin = 0
    for extent in source.extents:
        low, high = max(offset, begin), min(offset + len(target), begin + extent.size_bytes)
        if low < high:
            part = target[low - offset : high - offset]
            _read_file(files[extent.path], part, extent.offset + low - begin, source.name)
        begin += extent.size_bytes


def _read_file(file: SourceFile, target: memoryview, offset: int, name: str) -> None:
    done = 0
    try:
        while done < len(target):
            got = os.preadv(file.buffered, [target[done:]], offset + done)
            if not got:
                raise CheckpointError(
                    f"{file.path} has become shorter: '{name}' ends after {offset + done} bytes; put the file back"
                )
            done += got
        # It is read once: its pages would only push others out.
        os.posix_fadvise(file.buffered, offset, len(target), os.POSIX_FADV_DONTNEED)
    except OSError as error:
        raise CheckpointError(
            f"cannot read '{name}' from {file.path}: {error.strerror or error}"
        ) from error
