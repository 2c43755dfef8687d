"""What ONNX's own checker says of a model, whose weights may lie elsewhere and whose ends may have no shape."""

from __future__ import annotations

from typing import Any


def has_shapes(proto: Any) -> bool:
    """Return whether every input and output of a model's graph has a shape, which ONNX's checker insists on."""
    return not any(_is_shapeless(value) for value in (*proto.graph.input, *proto.graph.output))


def _is_shapeless(value: Any) -> bool:
    if not value.HasField("type"):
        return True
    kind = value.type
    # One without a type of its elements is damaged, and is left to the checker.
    return bool(
        kind.HasField("tensor_type")
        and kind.tensor_type.elem_type
        and not kind.tensor_type.HasField("shape")
    )


def check_graph(proto: Any) -> None:
    """Check a model but for where its weights lie; inputs and outputs need no shape, which inference finds or nobody.

    Raises:
        onnx.checker.ValidationError: it is no valid model.
    """
    import onnx

    plain = onnx.ModelProto()
    plain.CopyFrom(proto)
    for tensor in plain.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
            tensor.ClearField("dims")
            tensor.dims.append(0)
    for value in (*plain.graph.input, *plain.graph.output):
        if _is_shapeless(value):
            kind = value.type.tensor_type
            kind.elem_type = kind.elem_type or onnx.TensorProto.FLOAT
            kind.shape.SetInParent()
    onnx.checker.check_model(plain)
