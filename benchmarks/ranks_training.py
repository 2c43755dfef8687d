"""Training steps over equal ranks: Llama 405B on 128 hosts of eight, and LoHan's rows on one, two and four RTX 4090."""

from __future__ import annotations

import resource
import time
from dataclasses import replace
from typing import Any

from gascompile.core.checks.hosts import named_hosts
from gascompile.core.workload import OpSpec, TensorKind, TensorSpec, Workload
from gascompile.passes.parallel.plan_shards import plan_shards


def decoder_workload(
    name: str,
    *,
    layers: int,
    hidden: int,
    inner: int,
    kv: int,
    vocabulary: int,
    tokens: int,
    gated: bool,
) -> Workload:
    """Return the forward pass of ``tokens`` tokens through a decoder in two bytes per number.

    Attention's products of positions are left out: they are a few percent at 8,192 tokens a row, and recomputed by
    fused kernels in any plan.
    """
    tensors: list[TensorSpec] = []
    ops: list[OpSpec] = []
    wide = tokens * 2

    def tensor(of: str, size: int, kind: TensorKind) -> str:
        tensors.append(TensorSpec(name=of, size_bytes=size, kind=kind))
        return of

    def product(of: str, x: str, rows: int, columns: int, also: tuple[str, ...] = ()) -> str:
        weight = tensor(f"{of}.weight", rows * columns * 2, TensorKind.WEIGHT)
        out = tensor(f"{of}.out", columns * wide, TensorKind.ACTIVATION)
        moved = rows * columns * 2 + (rows + columns) * wide
        ops.append(
            OpSpec(
                name=of,
                time_s={"gpu": 0.0},
                reads=(x, weight, *also),
                writes=(out,),
                flops=2 * tokens * rows * columns,
                read_bytes=moved,
            )
        )
        return out

    ids = tensor("ids", tokens * 8, TensorKind.INPUT)
    x = product("embed", ids, vocabulary, hidden)
    ops[-1] = replace(
        ops[-1], flops=0, read_bytes=2 * hidden * wide, gathers={"embed.weight": hidden * wide}
    )
    for i in range(layers):
        q = product(f"layers.{i}.qkv", x, hidden, hidden + 2 * kv)
        a = product(f"layers.{i}.attention", q, hidden, hidden, (x,))
        up = product(f"layers.{i}.up", a, hidden, (2 if gated else 1) * inner)
        x = product(f"layers.{i}.down", up, inner, hidden, (a,))
    product("lm_head", x, hidden, vocabulary)
    return Workload(name=name, repeats=True, tensors=tuple(tensors), ops=tuple(ops))


def large_row(num_hosts: int = 128, layers: int = 126) -> dict[str, Any]:
    """Plan Llama 3.1 405B: a row of 8,192 tokens per rank, 8.4 million tokens a step on 1,024 ranks."""
    hosts = named_hosts("dgx-h100-128")
    hosts = replace(hosts, hosts=(replace(hosts.hosts[0], count=num_hosts),))
    workload = decoder_workload(
        "Llama 3.1 405B",
        layers=layers,
        hidden=16384,
        inner=53248,
        kv=1024,
        vocabulary=128256,
        tokens=8192,
        gated=True,
    )
    begun_s, used_s = time.perf_counter(), time.process_time()
    made = plan_shards(workload, hosts)
    return {
        "model": workload.name,
        "ranks": hosts.num_ranks,
        "predicted_s": made.predicted_s,
        "bound_s": made.lower_bound_s,
        "gap": made.gap,
        "binding": made.binding,
        "holds_over": made.holds_over,
        "groups": [f"{g.layers}: ZeRO-{g.zero_stage}, {g.activations}" for g in made.groups],
        "gpu_bytes": made.peak_bytes["gpu"],
        "wall_s": time.perf_counter() - begun_s,
        "cpu_s": time.process_time() - used_s,
        "process_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
