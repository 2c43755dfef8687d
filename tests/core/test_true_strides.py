"""True strides hold where they are asked for alone, however often results were remembered on either side."""

from __future__ import annotations

import threading

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gascompile.core.true_strides import true_strides


def _strides(fake: bool) -> tuple[int, ...]:
    """Return how the gradient of an image lies after a batch norm of one that lies otherwise."""
    mode = FakeTensorMode()
    image = torch.zeros(2, 3, 4, 4)
    gradient = torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
    ones = torch.ones(3)
    if fake:
        image, gradient, ones = (mode.from_tensor(value) for value in (image, gradient, ones))
    with torch.no_grad():
        result, *_ = torch.ops.aten.native_batch_norm_backward.default(
            gradient, image, ones, None, None, ones, ones, True, 1e-5, [True, True, True]
        )
    return tuple(result.stride())


def test_inside_and_outside_in_turns() -> None:
    real, outside = _strides(fake=False), _strides(fake=True)
    assert real != outside
    for _ in range(2):
        with true_strides():
            assert _strides(fake=True) == real
            with true_strides():
                assert _strides(fake=True) == real
            assert _strides(fake=True) == real
        assert _strides(fake=True) == outside


def test_what_torch_remembers_is_left_alone() -> None:
    _strides(fake=True)
    own, before = FakeTensorMode.cache, dict(FakeTensorMode.cache)
    with true_strides():
        _strides(fake=True)
    assert FakeTensorMode.cache is own
    assert own == before


def test_the_first_context_may_end_before_the_second() -> None:
    real, outside = _strides(fake=False), _strides(fake=True)
    begun, ended = threading.Event(), threading.Event()
    seen: list[tuple[int, ...]] = []

    def second() -> None:
        with true_strides():
            begun.set()
            assert ended.wait(60)
            seen.append(_strides(fake=True))

    thread = threading.Thread(target=second)
    with true_strides():
        thread.start()
        assert begun.wait(60)
    ended.set()
    thread.join()
    assert seen == [real]
    assert _strides(fake=True) == outside
