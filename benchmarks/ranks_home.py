"""Rings over four unequal home machines: what prima.cpp measured, what its rule would do by our clock, and our plans.

Models are described by their shapes and by the bytes of their Q4_K files. Three constants are fitted, each to one row:
the share of a GPU's bandwidth that a token reaches, to Qwen-2.5-14B on the desktop's GPU alone; the share of a
processor's, to Llama-1-30B by llama.cpp on the desktop alone; and the memory that the phone can swap, which the rule
counts and the table does not tell, to Llama-3-70B on the ring. A hop is assumed to take 1.5 ms;
with 2 ms our plan for 30B would take 72.06 ms. All other rows are predicted. Our plans are also made for the phone's
memory as the table has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gascompile.core.checks.hosts import named_hosts
from gascompile.core.hosts import Host, Hosts
from gascompile.core.workload import OpSpec, TensorKind, TensorSpec, Workload
from gascompile.passes.parallel.chain import chain
from gascompile.passes.parallel.cut_ring import cut_ring
from gascompile.passes.parallel.halda import halda
from gascompile.passes.parallel.ring_clock import Ring, Share, ring_seconds
from gascompile.passes.parallel.ring_problem import RingProblem, ring_problem

CONTEXT = 256
"""Tokens of the cache: as many as prima.cpp's example generates."""
_Q4, _Q6 = 0.5625, 0.8203
"""Bytes per number of the table of words and of the output layer in Q4_K_M files."""


@dataclass(frozen=True, slots=True)
class Decoder:
    """A model's shape, the bytes of its file, and what was measured, in ms per token."""

    name: str
    layers: int
    hidden: int
    cache_width: int
    """Of keys and values of a token in one layer, together."""
    vocabulary: int
    file_bytes: float
    measured_ms: float
    llama_cpp_ms: float


# Sizes of published Q4_K_M files; the two pruned models are taken to have as many bytes per parameter as the 70B.
TABLE = (
    Decoder("Llama 1-30B", 60, 6656, 2 * 6656, 32000, 19.62e9, 72, 202),
    Decoder("Llama 3-45B", 50, 8192, 2 * 1024, 128256, 27.12e9, 233, 328),
    Decoder("Llama 3-60B", 68, 8192, 2 * 1024, 128256, 36.16e9, 468, 7965),
    Decoder("Llama 1-65B", 80, 8192, 2 * 8192, 32000, 39.28e9, 569, 8807),
    Decoder("Llama 3-70B", 80, 8192, 2 * 1024, 128256, 42.52e9, 674, 10120),
    Decoder("Qwen-2.5-32B, QwQ-32B", 64, 5120, 2 * 1024, 152064, 19.85e9, 89, 224),
    Decoder("R1-Distill-Qwen-32B", 64, 5120, 2 * 1024, 152064, 19.85e9, 93, 232),
    Decoder("R1-Distill-Llama-70B", 80, 8192, 2 * 1024, 128256, 42.52e9, 724, 10978),
    Decoder("Qwen-2.5-72B", 80, 8192, 2 * 1024, 152064, 47.42e9, 867, 12227),
)
ON_ONE_GPU = Decoder("Qwen-2.5-14B", 48, 5120, 2 * 1024, 152064, 8.99e9, 23, 23)
ON_ONE_DESKTOP = TABLE[0]
FITTED = TABLE[4]
_SWAP_STEP, _SWAP_MOST = 1 << 30, 6 << 30
"""Of the phone's memory in bytes: it has 8 GB in all."""


def decode_workload(model: Decoder) -> Workload:
    """Return one token of a decoder: a table of words, layers with their cache, and an output layer."""
    table = model.vocabulary * model.hidden * _Q4
    output = model.vocabulary * model.hidden * _Q6
    layer = (model.file_bytes - table - output) / model.layers
    cache = CONTEXT * model.cache_width * 2
    hidden = model.hidden * 4
    tensors = [
        _tensor("words", table, TensorKind.WEIGHT),
        _tensor("output", output, TensorKind.WEIGHT),
    ]
    row = int(model.hidden * _Q4)
    read = {"flops": 0, "write_bytes": hidden}
    ops = [_op("look_up", ("words",), ("x0",), row, gathers={"words": row}, **read)]
    tensors.append(_tensor("x0", hidden, TensorKind.ACTIVATION))
    for i in range(model.layers):
        weight, state, out = f"layers.{i}.weight", f"cache.{i}", f"x{i + 1}"
        tensors.append(_tensor(weight, layer, TensorKind.WEIGHT))
        tensors.append(_tensor(state, cache, TensorKind.STATE))
        tensors.append(_tensor(out, hidden, TensorKind.ACTIVATION))
        reads, flops = (f"x{i}", weight, state), int(2 * layer / _Q4)
        ops.append(
            _op(f"layer{i}", reads, (out, state), layer + cache, flops=flops, write_bytes=hidden)
        )
    tensors.append(_tensor("logits", model.vocabulary * 4, TensorKind.OUTPUT))
    flops = int(2 * model.vocabulary * model.hidden)
    ops.append(
        _op(
            "project",
            (f"x{model.layers}", "output"),
            ("logits",),
            output,
            flops=flops,
            write_bytes=hidden,
        )
    )
    return Workload(name=model.name, repeats=True, tensors=tuple(tensors), ops=tuple(ops))


def _tensor(name: str, size: float, kind: TensorKind) -> TensorSpec:
    return TensorSpec(name=name, size_bytes=int(size), kind=kind)


def _op(
    name: str, reads: tuple[str, ...], writes: tuple[str, ...], size: float, **rest: Any
) -> OpSpec:
    return OpSpec(
        name=name, time_s={"cpu": 0.0}, reads=reads, writes=writes, read_bytes=int(size), **rest
    )


def scaled(hosts: Hosts, *, gpu: float, cpu: float, swap: int = 0) -> Hosts:
    """Return hosts whose memories reach shares of their bandwidths, and the phone with ``swap`` bytes more."""
    shares = {"gpu": gpu, "cpu": cpu}

    def slowed(host: Host) -> Host:
        machine = host.machine
        rates = (
            replace(rate, bandwidth_bytes_per_s=rate.bandwidth_bytes_per_s * shares[rate.device])
            for rate in machine.memory
        )
        machine = replace(machine, memory=tuple(rates))
        if host.name == "phone":
            ram = machine.tiers["cpu"]
            machine = machine.with_place(replace(ram, size_bytes=ram.size_bytes + swap))
        return replace(host, machine=machine)

    return replace(hosts, hosts=tuple(slowed(host) for host in hosts.hosts))


def _alone(hosts: Hosts, name: str) -> Hosts:
    return replace(
        hosts, hosts=tuple(host for host in hosts.hosts if host.name == name), network=None
    )


def _desktop_s(model: Decoder, hosts: Hosts) -> float:
    """Return the seconds of a token by llama.cpp on the desktop: as much as fits in its GPU, the rest beside it."""
    problem = ring_problem(chain(decode_workload(model)), _alone(hosts, "desktop"))
    layers = model.layers
    fits = min(problem.room(0, (0, False))[0], layers)
    in_gpu = model is ON_ONE_GPU
    ring = Ring((Share(fits, layers - fits),), 1, (0, in_gpu))
    return ring_seconds(problem, ring)


def fit(hosts: Hosts) -> dict[str, float]:
    """Return the three constants, each from its row."""
    gpu = _bisect(
        lambda x: _desktop_s(ON_ONE_GPU, scaled(hosts, gpu=x, cpu=1.0)), ON_ONE_GPU.measured_ms
    )
    cpu = _bisect(
        lambda x: _desktop_s(ON_ONE_DESKTOP, scaled(hosts, gpu=gpu, cpu=x)),
        ON_ONE_DESKTOP.llama_cpp_ms,
    )
    for swap in range(0, _SWAP_MOST, _SWAP_STEP):
        slowed = scaled(hosts, gpu=gpu, cpu=cpu, swap=swap)
        if _theirs(problem_of(FITTED, slowed))[0] * 1e3 <= FITTED.measured_ms:
            break
    return {"gpu": gpu, "cpu": cpu, "swap_bytes": swap}


def _bisect(seconds: Callable[[float], float], target_ms: float) -> float:
    """Return the share at which a row takes what was measured; more of a bandwidth is faster."""
    low, high = 0.2, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if seconds(middle) * 1e3 > target_ms else (low, middle)
    return (low + high) / 2


def problem_of(model: Decoder, hosts: Hosts) -> RingProblem:
    """Return a model on hosts."""
    return ring_problem(chain(decode_workload(model)), hosts)


def _theirs(problem: RingProblem) -> tuple[float, Ring | None]:
    """Return what the rule's placement takes, with the Mac as the head as in the project's own example."""
    ring = halda(problem, 0)
    return (float("inf"), None) if ring is None else (ring_seconds(problem, ring), ring)


def _words(problem: RingProblem, ring: Ring | None) -> str:
    if ring is None:
        return "none"
    names = [device.rank for device in problem.devices]
    held = [
        f"{name} {s.gpu}+{s.beside}-{s.streamed / problem.parts:.1f}"
        for name, s in zip(names, ring.shares, strict=True)
    ]
    return f"k={ring.rounds}, {', '.join(held)}"


def home_rows(models: Sequence[Decoder] = TABLE) -> dict[str, Any]:
    """Return the fitted constants and a row per model, in ms per token."""
    hosts = named_hosts("home-4")
    constants = fit(hosts)
    gpu, cpu, swap = constants["gpu"], constants["cpu"], int(constants["swap_bytes"])
    slowed, printed = scaled(hosts, gpu=gpu, cpu=cpu, swap=swap), scaled(hosts, gpu=gpu, cpu=cpu)
    rows = []
    for model in models:
        problem = problem_of(model, slowed)
        theirs_s, ring = _theirs(problem)
        ours = cut_ring(problem)
        without = cut_ring(problem_of(model, printed))
        rows.append(
            {
                "model": model.name,
                "fitted": model is FITTED,
                "measured_ms": model.measured_ms,
                "theirs_predicted_ms": theirs_s * 1e3,
                "theirs_error": theirs_s * 1e3 / model.measured_ms - 1,
                "ours_ms": ours.seconds * 1e3,
                "bound_ms": ours.bound_s * 1e3,
                "gap": 1 - ours.bound_s / ours.seconds,
                "ours_within_measured": ours.seconds * 1e3 <= model.measured_ms,
                "ours_without_swap_ms": without.seconds * 1e3,
                "bound_without_swap_ms": without.bound_s * 1e3,
                "theirs": _words(problem, ring),
                "ours": _words(problem, ours.ring),
            }
        )
    return {"constants": constants, "rows": rows}
