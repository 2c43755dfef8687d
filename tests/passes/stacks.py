"""Stacks of like layers between a table and an output layer."""

from __future__ import annotations

from gascompile.core.workload import OpSpec, TensorKind, TensorSpec, Workload

MB = 10**6


def stack(layers: int = 4, *, weight: int = 100 * MB, tokens: int = 1) -> Workload:
    """Return layers of one weight each between a table and an output layer."""
    tensors = [
        TensorSpec(name="table", size_bytes=50 * MB, kind=TensorKind.WEIGHT),
        TensorSpec(name="out", size_bytes=60 * MB, kind=TensorKind.WEIGHT),
        TensorSpec(name="x0", size_bytes=MB, kind=TensorKind.ACTIVATION),
    ]

    def op(name: str, reads: tuple[str, ...], write: str, size: int, **rest: object) -> OpSpec:
        return OpSpec(
            name=name,
            time_s={"cpu": 1.0},
            reads=reads,
            writes=(write,),
            flops=size * tokens,
            read_bytes=size,
            **rest,  # type: ignore[arg-type]
        )

    ops = [op("look_up", ("table",), "x0", 1000, gathers={"table": 1000})]
    for i in range(layers):
        tensors.append(TensorSpec(name=f"h.{i}.w", size_bytes=weight, kind=TensorKind.WEIGHT))
        tensors.append(TensorSpec(name=f"x{i + 1}", size_bytes=MB, kind=TensorKind.ACTIVATION))
        ops.append(op(f"layer{i}", (f"x{i}", f"h.{i}.w"), f"x{i + 1}", weight))
    tensors.append(TensorSpec(name="y", size_bytes=MB, kind=TensorKind.OUTPUT))
    ops.append(op("project", (f"x{layers}", "out"), "y", 60 * MB))
    return Workload(name="stack", repeats=True, tensors=tuple(tensors), ops=tuple(ops))
