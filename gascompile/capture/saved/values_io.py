"""Values of a graph to JSON and back: the layout of what each node gives, and which of them share memory.

A program says what is called, and a trace knows what comes out; passes look at that. Nothing is run to know it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from gascompile.core.errors import FormatError, UnsupportedOpError

_CONTAINERS = {"tuple": tuple, "list": list}
_DEVICE = torch.device("cpu")


def values_to_json(nodes: Iterable[fx.Node]) -> dict[str, Any]:
    """Return JSON data of what nodes give.

    Raises:
        UnsupportedOpError: a value has sizes that are not fixed, or is no plain tensor of the host.
    """
    storages: dict[int, int] = {}
    sizes_bytes: list[int] = []

    def encoded(value: Any) -> Any:
        if value is None or isinstance(value, (bool, int, float)):
            return {"is": value}
        if type(value) in (tuple, list):
            return {type(value).__name__: [encoded(part) for part in value]}
        if not isinstance(value, FakeTensor) or value.layout is not torch.strided:
            raise UnsupportedOpError(f"a {type(value).__name__} has no form in a kept capture")
        layout = [*value.shape, *value.stride(), value.storage_offset()]
        storage = value.untyped_storage()
        if value.device != _DEVICE or any(type(n) is not int for n in (*layout, storage.nbytes())):
            raise UnsupportedOpError(f"a value of {layout} has no form in a kept capture")
        if storage._cdata not in storages:
            storages[storage._cdata] = len(storages)
            sizes_bytes.append(storage.nbytes())
        dtype = str(value.dtype).removeprefix("torch.")
        return [dtype, value.dim(), *layout, storages[storage._cdata]]

    values = [encoded(node.meta.get("val")) for node in nodes]
    return {"values": values, "storages": sizes_bytes}


def set_values(nodes: Sequence[fx.Node], data: Any) -> None:
    """Give nodes the values of ``values_to_json``'s data.

    Raises:
        FormatError: the data is damaged, or of another graph.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def decoded(value: Any) -> Any:
        if isinstance(value, dict):
            ((kind, inner),) = value.items()
            return inner if kind == "is" else _CONTAINERS[kind](map(decoded, inner))
        name, dim, *layout, number = value
        shape, stride, (offset,) = layout[:dim], layout[dim : 2 * dim], layout[2 * dim :]
        tensor = torch.empty(0, dtype=getattr(torch, name), device="meta")
        tensor.set_(memory[number], offset, shape, stride)
        return FakeTensor(mode, tensor, _DEVICE)

    try:
        memory = [torch.UntypedStorage(size, device="meta") for size in data["storages"]]
        for node, value in zip(nodes, data["values"], strict=True):
            node.meta["val"] = decoded(value)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError) as error:
        raise FormatError(f"the values of a kept capture are damaged ({error})") from error
