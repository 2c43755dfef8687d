"""Own kernels: ops that torch writes in terms of others while it traces are traced as what eager runs instead."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_WRITTEN = (
    "_upsample_",
    "gru",
    "hardshrink",
    "lstm",
    "multi_margin_loss",
    "multilabel_margin_loss_forward",
    "rnn_relu",
    "rnn_tanh",
    "softshrink",
    "upsample_",
)
"""What names of such ops begin with. Their Python bodies round otherwise, or leave out dropout between layers."""


def _written() -> list[Any]:
    packets = [
        getattr(torch.ops.aten, name) for name in dir(torch.ops.aten) if name.startswith(_WRITTEN)
    ]
    return [
        getattr(packet, overload)
        for packet in packets
        if isinstance(packet, torch._ops.OpOverloadPacket)
        for overload in packet.overloads()
    ]


@contextmanager
def own_kernels() -> Iterator[None]:
    """Leave out torch's Python bodies of these ops."""
    taken = []
    for op in _written():
        kernels = dict(op.py_kernels)
        if kernels:
            taken.append((op, kernels))
            op.py_kernels.clear()
            op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op, kernels in taken:
            op.py_kernels.update(kernels)
            op._dispatch_cache.clear()


@contextmanager
def uncompiled() -> Iterator[None]:
    """Let what ``torch.compile`` was asked to compile run as it is written: a trace is made of its ops."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    settings: Any = torch._dynamo.config
    with torch.compiler.set_stance("force_eager"), settings.patch(error_on_nested_fx_trace=False):
        yield
