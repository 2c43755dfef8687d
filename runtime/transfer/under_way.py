"""What transfers under way have in common: a gate that opens at their end, and what has gone wrong with them."""

from __future__ import annotations

from dataclasses import dataclass, field

from gascompile.core.errors import StorageError
from gascompile.core.patience import Watch
from gascompile.core.waiting import Gate
from gascompile.runtime.protocols import Event
from gascompile.runtime.transfer.read_plan import Piece


@dataclass(slots=True, kw_only=True, eq=False)
class UnderWay:
    """A transfer until its end and after; a ``Ticket``."""

    error: BaseException | None = None
    gate: Gate = field(default_factory=Gate)
    event: Event | None = None
    """None: the bytes are in place once the gate is open."""

    @property
    def done(self) -> bool:
        return self.gate.is_open

    @property
    def failed(self) -> bool:
        return self.error is not None

    def wait(self) -> None:
        if not self.gate.is_open:
            self.gate.wait(Watch("a transfer"))
        if isinstance(self.error, StorageError):
            # A new object each time: several waiters must not share one traceback.
            raise StorageError(str(self.error)) from self.error.__cause__
        if self.error is not None:
            raise self.error


def cancelled(name: str) -> StorageError:
    """Return the error of a read that was not begun, or not ended."""
    return StorageError(f"the read of '{name}' was cancelled: its run or its session has ended")


def ends_too_early(piece: Piece, name: str, count: int) -> StorageError:
    """Return the error of a file that has ``count`` of a piece's bytes."""
    return StorageError(
        f"{piece.path} ends too early: '{name}' needs {piece.needed_bytes} bytes at offset {piece.offset}, the file "
        f"has {count} of them; the file is truncated, fetch it again"
    )


def moving_failed(name: str, error: Exception) -> StorageError:
    """Return the error of a tensor that could not be moved, to be raised by who waits for it."""
    why = error.strerror if isinstance(error, OSError) else repr(error)
    failure = StorageError(
        f"moving '{name}' failed: {why}; check the drives of the cache folder and of the weights"
    )
    failure.__cause__ = error
    return failure
