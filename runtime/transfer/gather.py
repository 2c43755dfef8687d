"""Single rows of a weight, read from its file while an op waits for them: embeddings.

On the CPU they are read to where the op finds them. For a device they are read into pinned memory of a
size that is known beforehand, as many rows at once as fit, and copied from there. Which rows they are
is known on the host only once compute has got there, so this blocks the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from gascompile.core.plan import Plan
from gascompile.runtime.memory.pinned import HOST, gathered_here, rows_bytes
from gascompile.runtime.protocols import HostMemory, Ticket
from gascompile.runtime.transfer.rows import check_rows, rows_landing

if TYPE_CHECKING:
    from gascompile.runtime.run.session import Session

_ROWS_AT_ONCE = 1024
"""Rows that are asked for together: each is a read with its own description, and a prompt can have many."""


class RowReader:
    """Reads rows for the ops of one plan."""

    def __init__(self, session: Session, plan: Plan) -> None:
        """Take the memory that rows pass through; raises ``DeviceError`` where it cannot be pinned."""
        self._session = session
        self._buffer: HostMemory | None = None
        self._here = {} if session.device.is_host else gathered_here(plan)
        """Weights whose rows lie in the host's memory."""
        from_host = plan.machine.link_from(HOST) if self._here else None
        self._host_link = session.link if from_host is None else from_host.name
        ops = plan.workload.ops
        names = {name for op in ops for name in op.gathers if name not in op.reads}
        if names and not session.device.is_host:
            sources = [session.source(name) for name in names]
            row_bytes = max(source.size_bytes // source.shape[0] for source in sources)
            self._buffer = session.row_buffer(rows_bytes(ops, row_bytes))

    @property
    def links(self) -> tuple[str, ...]:
        """Links beside that of checkpoints which rows come over."""
        return (self._host_link,) if self._here else ()

    def link(self, tensor: str) -> str:
        """Return the link that rows of ``tensor`` come over: the checkpoints', or the host's where they lie there."""
        return self._host_link if tensor in self._here else self._session.link

    def read(
        self, tensor: str, indices: torch.Tensor, *, key: int, wait: Callable[[Ticket], None]
    ) -> torch.Tensor:
        """Return the rows that ``indices`` names, in its shape; ``wait`` blocks until a ticket is done.

        Raises:
            IndexError: the weight has no such row.
        """
        session = self._session
        source, link, device = session.source(tensor), self.link(tensor), session.device
        indices = indices.cpu()
        check_rows(source, indices)
        dtype = getattr(torch, source.dtype)
        shape = (*indices.shape, *source.shape[1:])
        out = torch.empty(shape, dtype=dtype, device=device.torch_device)
        target = out.view(-1).view(torch.uint8)
        after = device.mark()
        stream = device.stream(link, ahead=True) if self._buffer is not None else None
        rows = indices.flatten()
        row_bytes = target.numel() // max(1, rows.numel())
        if tensor in self._here:
            ticket, table = session.host.whole(tensor)
            wait(ticket)
            lines = table.view(source.shape[0], -1)
        position = 0
        for part in rows.split(self._rows_at_once(row_bytes)):
            size_bytes = part.numel() * row_bytes
            memory = target.numpy().data if self._buffer is None else self._buffer.memory
            place = position if self._buffer is None else 0
            booking = None
            if stream is not None:
                booking = stream.book(size_bytes, after=after)
            try:
                if tensor in self._here and self._buffer is not None:
                    here = self._buffer.bytes(0, size_bytes).view(part.numel(), row_bytes)
                    torch.index_select(lines, 0, part, out=here)
                else:
                    landing = rows_landing(source, part.tolist())
                    wait(session.engine.submit(landing, place, key=key, link=link, memory=memory))
            except BaseException:
                if booking is not None:
                    booking.cancel()
                raise
            if self._buffer is not None and stream is not None:
                event = stream.copy(
                    target[position : position + size_bytes],
                    self._buffer.bytes(0, size_bytes),
                    name=tensor,
                    after=after,
                    booking=booking,
                )
                # The next rows come through the same memory.
                event.wait()
                device.hold(event)
            position += size_bytes
        return out

    def _rows_at_once(self, row_bytes: int) -> int:
        if self._buffer is None or not row_bytes:
            return _ROWS_AT_ONCE
        return max(1, min(_ROWS_AT_ONCE, self._buffer.size_bytes // row_bytes))
