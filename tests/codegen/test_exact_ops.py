"""Exact ops: compiled loops return the bits of torch's kernels, for special values and whatever torch computes with."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from gascompile.codegen.build import build
from gascompile.codegen.cpp import generate
from gascompile.core.kernels import KernelFiles, Segment
from gascompile.passes.graph.exact_ops import is_exact
from gascompile.runtime.kernels.fused import FusedSegment, bind, load_library

_aten = torch.ops.aten
_SPECIAL = (0.0, -0.0, 1.0, math.inf, -math.inf, math.nan, 1e-39, -1e-45, 3.4e38, 0.3, 1e-20)
_NUM_ELEMENTS = 10007
"""Prime: what is left over beside vectors is computed, too."""


def functions() -> dict[str, Callable[[Any, Any, Any], Any]]:
    """Return a function of tensors for each kind of exact op."""
    return {
        "add": lambda x, y, z: x + y,
        "add number": lambda x, y, z: x + 0.0,
        "sub": lambda x, y, z: x - y,
        "rsub": lambda x, y, z: _aten.rsub.Scalar(x, 0.3),
        "mul": lambda x, y, z: x * y,
        "mul number": lambda x, y, z: x * 0.3,
        "div": lambda x, y, z: x / y,
        "div number": lambda x, y, z: x / 0.3,
        "neg": lambda x, y, z: -x,
        "abs": lambda x, y, z: x.abs(),
        "reciprocal": lambda x, y, z: x.reciprocal(),
        "relu": lambda x, y, z: x.relu(),
        "threshold": lambda x, y, z: _aten.threshold_backward(x, y, 0),
        "square": lambda x, y, z: x.pow(2),
        "cube": lambda x, y, z: x.pow(3.0),
        "where": lambda x, y, z: torch.where(x >= 0.3, y, z),
        "equal": lambda x, y, z: torch.where((x == 0.3).logical_not(), y, z),
        "fill": lambda x, y, z: x.masked_fill(y < z, 0.3),
        "double": lambda x, y, z: (x.double() * 0.3 + y.double()).float(),
        "short": lambda x, y, z: (x * y).to(torch.bfloat16).float() - z,
        "not contracted": lambda x, y, z: x * y + z,
        "not regrouped": lambda x, y, z: ((x + y) - x) / 3.0 * 3.0 - z * 0.1 * 10.0,
        "cat": lambda x, y, z: torch.cat([x * 2.0, y]),
    }


def values(number: int) -> torch.Tensor:
    """Return numbers of all sizes, some of them special."""
    rng = torch.Generator().manual_seed(number)
    bits = torch.randint(-(1 << 31), (1 << 31) - 1, (_NUM_ELEMENTS,), generator=rng)
    found = bits.to(torch.int32).view(torch.float32)
    near = torch.randint(-(1 << 24), 1 << 24, (_NUM_ELEMENTS,), generator=rng) * 2.0**-20
    found = torch.where(torch.rand(_NUM_ELEMENTS, generator=rng) < 0.3, found, near)
    at = torch.randint(0, _NUM_ELEMENTS, (2000,), generator=rng)
    special = torch.tensor(_SPECIAL)
    found[at] = special[torch.randint(0, len(_SPECIAL), (2000,), generator=rng)]
    return found


def traced(function: Callable[..., Any]) -> fx.GraphModule:
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function)(*(torch.ones(_NUM_ELEMENTS) for _ in range(3)))


def eager(path: str = "") -> list[torch.Tensor]:
    """Return what torch makes of the values by each function, and save it."""
    given = [values(number) for number in range(3)]
    found = [function(*given) for function in functions().values()]
    if path:
        torch.save(found, path)
    return found


def compiled() -> list[torch.Tensor]:
    """Return what one kernel makes of them."""
    graph = traced(lambda *given: [function(*given) for function in functions().values()]).graph
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    assert all(is_exact(node) for node in nodes)
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    outputs = list(graph.output_node().all_input_nodes)
    written = generate("0" * 40, nodes, inputs, outputs)
    segment = Segment(
        ops=tuple(node.name for node in nodes),
        inputs=tuple(node.name for node in inputs),
        outputs=tuple(node.name for node in outputs),
        scratch_limit_bytes=0,
        key="",
    )
    library = load_library(KernelFiles(record=b"{}", code=build(written.sources)))
    fused = FusedSegment(segment=segment, kernel=written.kernel, library=library)
    call = bind(fused, {node.name: node for node in graph.nodes})
    return list(call(*(values(number) for number in range(3))))


def test_kernels_have_torchs_bits_whatever_torch_computes_with(tmp_path: Path) -> None:
    path = tmp_path / "eager.pt"
    done = subprocess.run(
        [sys.executable, "-c", f"import {__name__} as tests; tests.eager({str(path)!r})"],
        env={**os.environ, "ATEN_CPU_CAPABILITY": "default"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert not done.returncode, done.stderr[-2000:]
    found = compiled()
    for expected in (eager(), torch.load(path)):
        for name, ours, theirs in zip(functions(), found, expected, strict=True):
            same = ours.view(torch.int32) == theirs.view(torch.int32)
            assert bool((same | (ours.isnan() & theirs.isnan())).all()), name


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y, z: torch.add(x, y, alpha=0.7),
        lambda x, y, z: x.sqrt(),
        lambda x, y, z: x.tanh(),
        lambda x, y, z: x.pow(4),
        lambda x, y, z: x.pow(y),
        torch.addcmul,
        lambda x, y, z: x.sum(0),
        lambda x, y, z: torch.div(x, y, rounding_mode="floor"),
        lambda x, y, z: x + y.double(),
        lambda x, y, z: x.bfloat16() + 1,
        lambda x, y, z: x.long(),
        lambda x, y, z: x.double().bfloat16(),
        lambda x, y, z: torch.arange(3) > 0.5,
        lambda x, y, z: torch.full_like(x, 0.1, dtype=torch.float64),
    ],
    ids=[
        "alpha",
        "sqrt",
        "tanh",
        "pow",
        "power",
        "addcmul",
        "sum",
        "floor",
        "promoted",
        "short",
        "integer",
        "twice",
        "compared",
        "constant",
    ],
)
def test_what_may_round_otherwise_is_left_alone(function: Callable[..., Any]) -> None:
    nodes = [node for node in traced(function).graph.nodes if node.op == "call_function"]
    assert not is_exact(nodes[-1])
