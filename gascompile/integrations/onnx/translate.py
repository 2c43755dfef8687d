"""From an ONNX file to a module, whose weights are on the meta device."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from gascompile.integrations.onnx.graph import Constant, OnnxGraph, read_graph
from gascompile.integrations.onnx.module import OnnxModel


def onnx_module(file: Path) -> OnnxModel:
    """Return the model of an ONNX file with its weights on the meta device, in eval mode; raises as ``read_graph``."""
    graph = read_graph(file)
    model = OnnxModel(graph.steps, graph.known, graph.inputs, graph.outputs)
    _add_tensors(model, graph)
    return model.eval()


def _add_tensors(model: OnnxModel, graph: OnnxGraph) -> None:
    for name, source in graph.file.weights.items():
        if name not in graph.used:
            continue
        owner, _, leaf = source.name.rpartition(".")
        module: nn.Module = model
        for part in owner.split(".") if owner else ():
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        value = torch.empty(source.shape, dtype=getattr(torch, source.dtype), device="meta")
        module.register_parameter(leaf, nn.Parameter(value, requires_grad=False))
        model.tensors[name] = source.name
    for number, (name, constant) in enumerate(graph.held.items()):
        model.register_buffer(
            f"onnx_constant_{number}", constant_tensor(constant), persistent=False
        )
        model.tensors[name] = f"onnx_constant_{number}"


def constant_tensor(constant: Constant) -> torch.Tensor:
    """Return a constant as a tensor."""
    name, shape, content = constant
    dtype = getattr(torch, name)
    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=dtype).reshape(shape)
