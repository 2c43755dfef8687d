"""Group work: what a group of ``torch.distributed`` does behind the thread that has begun it."""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist

LOOK_S = 1.0
"""Between two looks whether there is still something to wait for."""
_SOON_S, _LATER_S, _LATE = 5e-5, 1e-3, 1 / 16
"""Between two looks at an exchange: the least, the most, and the share of what has passed, by which it ends late."""


_lent: deque[torch.Tensor] = deque(maxlen=1024)
"""What groups were given last. A thread of theirs that is the last to hold a tensor of Python's asks for Python to let
go of it, and where Python has begun to end, it ends the process."""


def ends(work: dist.Work, waits: Callable[[float], bool]) -> bool:
    """Wait for the end of an exchange; return False where it is given up.

    Gloo's own wait goes on beyond the time that it is given, until that of the group.

    Args:
        work: the exchange.
        waits: says after so many seconds of waiting whether to wait on; asked once a second.

    Raises:
        RuntimeError: the exchange is broken.
    """
    begin_s, look_s = time.monotonic(), LOOK_S
    while not work.is_completed():
        passed_s = time.monotonic() - begin_s
        if passed_s > look_s:
            if not waits(passed_s):
                return False
            look_s = passed_s + LOOK_S
        time.sleep(min(max(passed_s * _LATE, _SOON_S), _LATER_S))
    work.wait()
    return True


def unowned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor's elements as a vector that does not keep its memory."""
    if tensor.device.type != "cpu" or not tensor.numel():
        return tensor
    size_bytes = tensor.numel() * tensor.element_size()
    memory = (ctypes.c_char * size_bytes).from_address(tensor.data_ptr())
    vector = torch.frombuffer(memory, dtype=tensor.dtype)
    _lent.append(vector)
    return vector
