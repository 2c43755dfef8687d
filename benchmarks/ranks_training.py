"""Training steps over equal ranks: Llama 405B on 128 hosts of eight, and LoHan's rows on one, two and four RTX 4090.

Of LoHan two constants are fitted, both to rows of one GPU: the share of its rate that products reach, to 64 rows, and
the share of the host memory's bandwidth that copies, drives and updates reach together, to 8 rows. Every other row is
predicted, with parameters and states on drives as LoHan has them; our plans may put them anywhere.
"""

from __future__ import annotations

import resource
import time
from dataclasses import replace
from typing import Any

from gascompile.core.checks.hosts import named_hosts
from gascompile.core.hosts import Host, Hosts, Interconnect
from gascompile.core.hosts_plan import HostsPlan
from gascompile.core.machine import ComputeRate, Link, Machine, MemoryRate, Pipe, Place, PlaceKind
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


LOHAN = {
    # Ranks, rows per rank: TFLOPS of all ranks.
    (1, 8): 42.8, (1, 16): 84.3, (1, 32): 143.1, (1, 64): 155.8,
    (2, 8): 55.0, (2, 16): 103.2, (2, 32): 194.7, (2, 64): 278.2,
    (4, 8): 106.5, (4, 16): 209.7, (4, 32): 358.7, (4, 64): 514.4,
}  # fmt: skip
"""13B on RTX 4090 with twelve drives, as its authors publish it: https://github.com/RC4ML/LoHan, evaluation_data.md."""
_WIDE, _NARROW = (1, 64), (1, 8)
"""The rows that constants are fitted to."""
_PARAMETERS = 13e9


def lohan_hosts(ranks: int, share: float, host_share: float) -> Hosts:
    """Return its host with ``ranks`` GPUs.

    Args:
        ranks: how many.
        share: of the datasheet's rate that products reach.
        host_share: of the host memory's bandwidth that all that passes it reaches: copies, drives, updates.
    """
    places = (
        _place("gpu", PlaceKind.GPU, 24e9, "datasheet: GeForce RTX 4090, 24 GB"),
        _place("cpu", PlaceKind.CPU, 768e9, "its authors: 768 GB"),
        _place("nvme", PlaceKind.NVME, 12 * 3.84e12, "its authors: 12 x D7-P5510 of 3.84 TB"),
    )
    pcie = "datasheet: PCI Express 4.0 x16"
    drives = "datasheet: Solidigm D7-P5510 3.84 TB, 6,500 MB/s read and 3,400 MB/s written, twelve of them"
    read, write = 12 * 6.5e9, 12 * 3.4e9
    links = (
        _link("cpu", "gpu", 31.5e9, (), pcie),
        _link("gpu", "cpu", 31.5e9, (), pcie),
        _link("nvme", "cpu", read, ("read",), drives),
        _link("cpu", "nvme", write, ("write",), drives),
    )
    pipes = (
        Pipe(name="read", bandwidth_bytes_per_s=read, source=drives),
        Pipe(name="write", bandwidth_bytes_per_s=write, source=drives),
    )
    dram = "its authors: 16 channels of DDR4-3200"
    machine = Machine(
        name="RTX 4090 with twelve drives",
        places=places,
        links=links,
        pipes=pipes,
        rates=(
            ComputeRate(
                device="gpu", dtype="float16", flops_per_s=165.2e12 * share, source="fitted"
            ),
            ComputeRate(device="cpu", dtype="float32", flops_per_s=3.66e12, source="assumed"),
        ),
        memory=(
            MemoryRate(device="gpu", bandwidth_bytes_per_s=1008e9, source="datasheet: RTX 4090"),
            MemoryRate(device="cpu", bandwidth_bytes_per_s=409.6e9 * host_share, source=dram),
        ),
    )
    # GeForce GPUs do not copy to each other: what they exchange goes through the host's memory.
    peers = Interconnect(
        bandwidth_bytes_per_s=31.5e9,
        latency_s=2e-5,
        through_memory=True,
        source=dram,
    )
    host = Host(
        name="h",
        machine=machine,
        ranks=ranks,
        shared=("read", "write"),
        peers=peers if ranks > 1 else None,
    )
    return Hosts(name=f"{ranks} x RTX 4090", hosts=(host,))


def _place(name: str, kind: PlaceKind, size: float, source: str) -> Place:
    return Place(name=name, kind=kind, size_bytes=int(size), source=source)


def _link(begin: str, end: str, rate: float, shared: tuple[str, ...], source: str) -> Link:
    return Link(
        source_tier=begin,
        target_tier=end,
        bandwidth_bytes_per_s=rate,
        latency_s=2e-5,
        shared=shared,
        source=source,
    )


def _lohan_plan(
    row: tuple[int, int], shares: tuple[float, float], homes: tuple[str, ...]
) -> HostsPlan:
    ranks, rows = row
    workload = decoder_workload(
        "13B",
        layers=40,
        hidden=5120,
        inner=4 * 5120,
        kv=5120,
        vocabulary=50257,
        tokens=1024 * rows,
        gated=False,
    )
    return plan_shards(workload, lohan_hosts(ranks, *shares), homes=homes)


def _tflops(row: tuple[int, int], seconds: float) -> float:
    """Return six FLOPs per parameter and token, of all ranks; another count would scale all rows alike."""
    return 6 * _PARAMETERS * row[0] * row[1] * 1024 / seconds / 1e12


def _fitted(steps: int) -> tuple[float, float]:
    """Return the shares at which the two rows take what was measured, found in turn by bisection."""
    shares = [0.9, 0.2]
    for _ in range(2):
        for which, row in ((1, _NARROW), (0, _WIDE)):
            low, high = 0.02, 1.2
            for _ in range(steps):
                shares[which] = (low + high) / 2
                made = _lohan_plan(row, (shares[0], shares[1]), ("nvme",))
                slow = _tflops(row, made.predicted_s) < LOHAN[row]
                low, high = (shares[which], high) if slow else (low, shares[which])
    return shares[0], shares[1]


def lohan_rows(*, toy: bool = False) -> dict[str, Any]:
    """Return the fitted constants and a row per number of GPUs and of rows, in TFLOPS of all GPUs."""
    shares = _fitted(2 if toy else 10)
    rows = []
    for row in (_WIDE, (2, 64)) if toy else LOHAN:
        theirs = _lohan_plan(row, shares, ("nvme",))
        ours = _lohan_plan(row, shares, ())
        predicted = _tflops(row, theirs.predicted_s)
        rows.append(
            {
                "gpus": row[0],
                "rows_per_gpu": row[1],
                "fitted": row in (_WIDE, _NARROW),
                "measured_tflops": LOHAN[row],
                "predicted_tflops": predicted,
                "error": predicted / LOHAN[row] - 1,
                "binding": theirs.binding,
                "gap": theirs.gap,
                "ours_tflops": _tflops(row, ours.predicted_s),
                "ours_gap": ours.gap,
            }
        )
    return {"gpu_share": shares[0], "host_memory_share": shares[1], "rows": rows}
