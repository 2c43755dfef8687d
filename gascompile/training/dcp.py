"""DCP: checkpoints as storage of ``torch.distributed.checkpoint``, which reads them at any sharding and writes such.

DCP's own storage keeps its metadata as a pickle, which runs code when it is read. Here metadata are made from the
headers of the files, so nothing is unpickled; values that are no tensors are refused.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import uuid
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from gascompile.core.errors import CheckpointError, StorageError, UnsupportedOpError
from gascompile.training.state.checkpoints import RANDOM
from gascompile.training.state.pieces import Files, Stored, TensorPiece, named, stored_in
from gascompile.training.state.run_state import STATE, read_state
from gascompile.training.state.tensor_files import Entry, Part, write_tensors
from gascompile.training.state.whole_checkpoints import (
    MANIFEST,
    RANKS_FORMAT,
    Listed,
    Saving,
    files_of,
    found_in,
    listed_of,
    verify,
)

Result = TypeVar("Result")
_FILE_BYTES = 5 << 30
"""Of one file of ``consolidate``; what Hugging Face's own writers take."""


class CheckpointReader(StorageReader):
    """Reads checkpoints of ``step.save`` and of ``CheckpointWriter`` for ``dcp.load``; needs no metadata file.

    Tensors of the model have the names of ``model.state_dict()`` behind ``model``; moments those of DCP's
    ``get_optimizer_state_dict`` behind ``optimizer``: ``optim.state.<parameter>.exp_avg``.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, model: str = "", optimizer: str = "optim."
    ) -> None:
        """Name a checkpoint, or a folder of which the newest is taken.

        Args:
            folder: the one or the other.
            model: what names of the model's tensors begin with, such as ``"model."``.
            optimizer: what names of the optimizer's begin with.
        """
        self.checkpoint_id = folder
        self._prefixes = (model, optimizer)
        self._stored: dict[str, Stored] = {}
        self._numbers: dict[str, torch.Tensor] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Take another folder, if one is given."""
        self.checkpoint_id = checkpoint_id or self.checkpoint_id

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return what tensors there are, from the headers of the files, whose digests are compared.

        Raises:
            CheckpointError: there is no checkpoint, or it is damaged.
        """
        folder = newest_of(self.checkpoint_id)
        verify(folder)
        model, optimizer = self._prefixes
        self._stored, self._numbers = {}, {}
        for name, stored in stored_in(files_of(folder)).items():
            if not name.startswith(RANDOM):
                self._stored[_name_in(stored, model, optimizer)] = stored
        if (folder / STATE).is_file():
            for name, count in read_state(folder)["updates"].items():
                self._numbers[f"{optimizer}state.{name}.step"] = torch.tensor(float(count))
        kinds = {name: _metadata_of(stored) for name, stored in self._stored.items()}
        kinds |= {
            name: _metadata_of(Stored(name=name, dtype="float32", shape=(), pieces=()))
            for name in self._numbers
        }
        return Metadata(state_dict_metadata=dict(kinds), storage_data={})

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any
    ) -> None:
        """Need nothing more."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the boxes that a plan asks for.

        Raises:
            StorageError: a file cannot be read.
        """
        with Files() as files:
            for item in plan.items:
                assert item.type == LoadItemType.TENSOR, "there is nothing else"
                try:
                    box = self._box(files, item)
                except OSError as error:
                    raise StorageError(
                        f"cannot read '{item.storage_index.fqn}' of {self.checkpoint_id}: {error.strerror or error}"
                    ) from error
                target = planner.resolve_tensor(item).detach()
                target.copy_(box)
                planner.commit_tensor(item, target)
        return _done(None)

    def _box(self, files: Files, item: ReadItem) -> torch.Tensor:
        """Return the box of a piece that an item asks for; of the rows of the piece no others are read."""
        index, lengths, offsets = item.storage_index, item.lengths, item.storage_offsets
        if index.fqn in self._numbers:
            return self._numbers[index.fqn]
        stored = self._stored[index.fqn]
        piece = next(p for p in stored.pieces if p.offsets == tuple(index.offset or ()))
        dtype: torch.dtype = getattr(torch, stored.dtype)
        if not piece.sizes:
            number = torch.empty((), dtype=dtype)
            files.read(piece, 0, number)
            return number
        rows = torch.empty((lengths[0], *piece.sizes[1:]), dtype=dtype)
        skipped = offsets[0] * math.prod(piece.sizes[1:]) * dtype.itemsize
        files.read(piece, skipped, rows)
        ends = zip(offsets[1:], lengths[1:], strict=True)
        return rows[(slice(None), *(slice(begin, begin + length) for begin, length in ends))]

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether it names a folder."""
        return Path(checkpoint_id).is_dir()


class CheckpointWriter(StorageWriter):
    """Writes what ``dcp.save`` is given as checkpoints of this project: whole ones alone have a name."""

    def __init__(self, folder: str | os.PathLike[str], *, keep: int = 1) -> None:
        """Name the folder, which all ranks have to share, and how many checkpoints stay.

        Args:
            folder: of checkpoints; a save adds one.
            keep: how many there are at most afterwards, this one included.
        """
        self.checkpoint_id, self._keep = folder, keep
        self._saving: Saving | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another save, in another folder if one is given."""
        self.checkpoint_id = checkpoint_id or self.checkpoint_id
        self._saving = None

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **__: Any) -> None:
        """Let the coordinator make the folder.

        Raises:
            StorageError: it cannot.
        """
        if is_coordinator:
            folder = Path(self.checkpoint_id)
            with _writing(folder):
                folder.mkdir(parents=True, exist_ok=True)
                self._saving = Saving(folder, mark=f"-{uuid.uuid4().hex[:8]}")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan; raises ``UnsupportedOpError`` where it has values that are no tensors."""
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                raise UnsupportedOpError(
                    f"'{item.index.fqn}' is no tensor, and DCP would pickle it; save tensors, and the rest beside"
                )
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Tell each rank the folder and its number."""
        assert self._saving is not None, "the coordinator has made it"
        name, size = self._saving.temporary.name, len(plans)
        return [replace(plan, storage_data=(name, i + 1, size)) for i, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors to a file, on the drive when it returns.

        Raises:
            StorageError: it cannot be written.
        """
        name, number, size = plan.storage_data
        folder = Path(self.checkpoint_id) / name
        parts = [_part(item, planner) for item in plan.items]
        files: dict[str, int] = {}
        listed: Listed = {}
        with _writing(folder):
            try:
                if parts:
                    path = folder / f"model-{number:05d}-of-{size:05d}.safetensors"
                    write_tensors(path, parts, None, files)
                    listed = listed_of(folder, files)
            finally:
                for descriptor in files.values():
                    os.close(descriptor)
        results = [
            WriteResult(index=i.index, size_in_bytes=p.value.size_bytes, storage_data=listed)
            for i, p in zip(plan.items, parts, strict=True)
        ]
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:  # noqa: ARG002
        """Make it whole: the manifest of all files, then its name; then older ones go.

        Raises:
            StorageError: it cannot be written; the checkpoints before it are still there.
        """
        assert self._saving is not None, "the coordinator has made it"
        files: Listed = {}
        for own in results:
            files.update(own[0].storage_data if own else {})
        with _writing(self._saving.temporary):
            try:
                self._saving.complete(files, RANKS_FORMAT)
            finally:
                self._saving.abandon()
            self._saving.retire(self._keep)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether a folder can have that name."""
        path = Path(checkpoint_id)
        return path.is_dir() or not path.exists()


def newest_of(folder: str | os.PathLike[str]) -> Path:
    """Return a checkpoint, or the newest in a folder of them; raises ``CheckpointError``."""
    path = Path(folder)
    if not (saved := found_in(path)) and not (path / MANIFEST).is_file():
        raise CheckpointError(
            f"there is no checkpoint in {path}; pass the folder that save was given"
        )
    return saved[-1] if saved else path


def consolidate(
    checkpoint: str | os.PathLike[str],
    into: str | os.PathLike[str],
    *,
    file_bytes: int = _FILE_BYTES,
) -> Path:
    """Write the model of a checkpoint as Hugging Face has it, by DCP's writer, and return the new folder.

    One file of it is in memory at a time, twice.

    Args:
        checkpoint: one, or a folder of which the newest is taken.
        into: a folder that is not there yet.
        file_bytes: how much of the model a file has at most, one tensor aside.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
        StorageError: the folder is there, or cannot be written.
    """
    target = Path(into)
    folder = newest_of(checkpoint)
    verify(folder)
    names = {n: s for n, s in stored_in(files_of(folder)).items() if _is_of_model(s)}
    if target.exists():
        raise StorageError(f"{target} is there already; choose another name")
    numbers, number, filled = {}, 1, 0
    for name, stored in sorted(names.items()):
        size_bytes = math.prod(stored.shape) * getattr(torch, stored.dtype).itemsize
        if filled and filled + size_bytes > file_bytes:
            number, filled = number + 1, 0
        filled += size_bytes
        numbers[name] = number
    temporary = target.with_name(f".{target.name}-{uuid.uuid4().hex[:8]}")
    outlines = {
        name: torch.empty(s.shape, dtype=getattr(torch, s.dtype), device="meta")
        for name, s in names.items()
    }
    writer = HuggingFaceStorageWriter(str(temporary), fqn_to_index_mapping=numbers)
    with _writing(target), Files() as files, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            planner = _Filled(names, files)
            save(outlines, storage_writer=writer, planner=planner, no_dist=True)
            temporary.rename(target)
        except CheckpointException as error:
            cause, _ = next(iter(error.failures.values()))
            if isinstance(cause, CheckpointError) or not isinstance(cause, Exception):
                raise cause from None
            raise StorageError(f"cannot write {target}: {cause}") from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return target


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot write {folder}: {error.strerror or error}") from error


def _done(value: Result) -> Future[Result]:
    future: Future[Result] = Future()
    future.set_result(value)
    return future


class _Filled(DefaultSavePlanner):
    """Gives tensors of a checkpoint in the place of their outlines, each when it is written."""

    def __init__(self, stored: Mapping[str, Stored], files: Files) -> None:
        super().__init__()
        self._stored, self._files = stored, files

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        """Return a tensor's value."""
        stored = self._stored[index.fqn]
        value = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
        self._files.whole(stored, value)
        return value


def _is_of_model(stored: Stored) -> bool:
    return all(piece.file.name.startswith("model") for piece in stored.pieces)


def _name_in(stored: Stored, model: str, optimizer: str) -> str:
    if _is_of_model(stored):
        return f"{model}{stored.name}"
    parameter, _, key = stored.name.rpartition(":")
    return f"{optimizer}state.{parameter}.{key}"


def _metadata_of(stored: Stored) -> TensorStorageMetadata:
    pieces: Iterable[TensorPiece] = stored.pieces
    chunks = [
        ChunkStorageMetadata(offsets=torch.Size(p.offsets), sizes=torch.Size(p.sizes))
        for p in pieces
    ] or [ChunkStorageMetadata(offsets=torch.Size(()), sizes=torch.Size(()))]
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=getattr(torch, stored.dtype)),
        size=torch.Size(stored.shape),
        chunks=chunks,
    )


def _part(item: WriteItem, planner: SavePlanner) -> Part:
    """Return what an item writes, whose value is asked for when it is written."""
    data = item.tensor_data
    assert data is not None, "others were refused"
    shape, sizes = tuple(data.size), tuple(data.chunk.sizes)
    value = Entry(dtype=data.properties.dtype, shape=sizes, made=partial(_resolved, item, planner))
    if shape == sizes:
        return Part(value=value, keys=((item.index.fqn, shape),))
    row = named(item.index.fqn, shape, tuple(data.chunk.offsets))
    return Part(value=value, keys=((row[0], sizes),), table=(row,))


def _resolved(item: WriteItem, planner: SavePlanner) -> torch.Tensor:
    tensor = planner.resolve_data(item)
    assert isinstance(tensor, torch.Tensor), "others were refused"
    return tensor.cpu()
