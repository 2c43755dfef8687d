"""Stage ops: what the stages of a pipeline send each other, as ops of their programs.

A value is sent as the bytes of its memory, which has the same layout on both ranks. Ops that send return at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from gascompile.core.ranks import STAGE_OPS
from gascompile.runtime.collectives.exchange import exchange_under_way

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_library = torch.library.Library(STAGE_OPS, "DEF")
_library.define("send(Tensor value, int peer, int tag) -> ()")
_library.define(
    "receive(Tensor like, int peer, int tag, int[] shape, int[] stride, ScalarType dtype) -> Tensor"
)


def _send(value: torch.Tensor, peer: int, tag: int) -> None:
    exchange_under_way().send(value, peer, tag)


def _receive(
    like: torch.Tensor, peer: int, tag: int, shape: list[int], stride: list[int], dtype: torch.dtype
) -> torch.Tensor:
    """Return what rank ``peer`` has sent under ``tag``.

    Args:
        like: any tensor of the device.
        peer: the rank that sends.
        tag: of the message, unique in a step.
        shape: of the value.
        stride: of the value.
        dtype: of the value.
    """
    received = torch.empty_strided(shape, stride, dtype=dtype, device=like.device)
    exchange_under_way().receive(received, peer, tag)
    return received


for _key in ("CPU", "CUDA"):
    _library.impl("send", _send, _key)
    _library.impl("receive", _receive, _key)
_library.impl("send", lambda value, peer, tag: None, "Meta")
_library.impl(
    "receive",
    lambda like, peer, tag, shape, stride, dtype: torch.empty_strided(
        shape, stride, dtype=dtype, device="meta"
    ),
    "Meta",
)

send = torch.ops.gascompile_stages.send.default
receive = torch.ops.gascompile_stages.receive.default


def is_pipeline(mesh: DeviceMesh | None) -> bool:
    """Return whether the ranks of a mesh are stages of pipelines: its last dimension, of several, is named ``pp``."""
    if mesh is None or mesh.mesh_dim_names not in (("pp",), ("dp", "pp")):
        return False
    return mesh["pp"].size() > 1


def is_of_stages(target: object) -> bool:
    """Return whether an op needs another stage of a pipeline."""
    return isinstance(target, torch._ops.OpOverload) and target.namespace == STAGE_OPS


def message_bytes(target: object, args: Sequence[Any]) -> int:
    """Return the bytes of a message, of an op's arguments with tensors in the place of nodes."""
    if target is send:
        size: int = args[0].numel() * args[0].element_size()
        return size
    count = 1
    for length in args[3]:
        count *= length
    dtype: torch.dtype = args[5]
    return count * dtype.itemsize
