"""What torch's allocator really handed out, kernels' own buffers included: an oracle for memory promises."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_growth_bytes(call: Callable[[], object]) -> int:
    """Return by how many bytes the CPU allocator's total rose at most above its start during ``call``.

    What ``call`` returns is still alive when the trace ends.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        kept = call()
    assert trace.profiler is not None
    results = trace.profiler.kineto_results
    assert results is not None
    live = peak = 0
    for size_bytes in _allocations(results.experimental_event_tree()):
        live += size_bytes
        peak = max(peak, live)
    del kept
    return peak


def _allocations(roots: Iterable[Any]) -> Iterator[int]:
    events = sorted(
        (event for event in _walk(roots) if event.tag.name == "Allocation"),
        key=lambda event: event.start_time_ns,
    )
    for event in events:
        yield event.extra_fields.alloc_size


def _walk(events: Iterable[Any]) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _walk(event.children)
