"""Trades: each rank gives each other its part of a vector, all of them at once and over Gloo.

Gloo sends what its peer is ready for at once, and in order: a rank that sends before it says what it is ready to
receive says so behind all that it sends, and the peer begins when this one is done. ``all_to_all_single`` does that.
Ranks that receive first use a network both ways at once. [Empirical] Between two hosts, 8 MiB each way at 40 MB/s take
0.22 s in place of 0.43, at 125 MB/s 0.072 in place of 0.139.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from gascompile.runtime.collectives.group_work import unowned
from gascompile.runtime.collectives.waiting import Waiting, WaitingThread, begun

_FIRST_TAG, _NUM_TAGS = 1 << 30, 1 << 24
"""Letters of the group have lower ones. Far fewer trades are under way at once."""


_kept: list[torch.Tensor] = []


class Trades:
    """One rank's trades with the others of a group, which begin the same ones in the same order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Trade over ``group``."""
        self._group: dist.ProcessGroup | None = group
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._thread: WaitingThread | None = None
        self._count = 0

    def leave(self) -> None:
        """Hold the group no longer; idempotent."""
        self._group = None
        if self._thread is not None:
            self._thread.end()
        self._thread = None

    def begin(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_sizes: Sequence[int],
        sent_sizes: Sequence[int],
    ) -> Waiting:
        """Begin to send each rank its part of ``sent``, and to receive as much as it has for this one.

        Args:
            received: a vector in the processor's memory, of one rank's part after the other. Who calls keeps it until
                the end: nothing here does.
            sent: another, as is.
            received_sizes: elements from each rank.
            sent_sizes: elements for each rank.

        Raises:
            RuntimeError: another rank or the group is gone.
        """
        if self._group is None:
            raise RuntimeError("this rank has left its group")
        comes, goes = received.split(list(received_sizes)), sent.split(list(sent_sizes))
        comes[self._rank].copy_(goes[self._rank])
        tag = _FIRST_TAG + self._count % _NUM_TAGS
        self._count += 1
        # No rank is everybody's first.
        others = [(self._rank + step) % self._size for step in range(1, self._size)]
        works: list[dist.Work] = []
        how: dict[str, Any] = {"group": self._group, "tag": tag}
        try:
            works.extend(
                begun(dist.irecv(unowned(comes[peer]), group_src=peer, **how))
                for peer in others
                if received_sizes[peer]
            )
            works.extend(
                begun(dist.isend(unowned(goes[peer]), group_dst=peer, **how))
                for peer in others
                if sent_sizes[peer]
            )
        except BaseException:
            # The others may still come for what is here, and bring what is for it.
            _kept.extend((received, sent))
            raise
        if self._thread is None:
            self._thread = WaitingThread()
        waiting = Waiting(works)
        self._thread.put(waiting)
        return waiting
