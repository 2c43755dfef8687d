"""FLOPs of single ops, against torch's own count of the products that they stand for."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from gascompile.cost_models.formulas.flops import flops_of, is_heavy

aten: Any = torch.ops.aten
A, B = torch.ones(6, 5), torch.ones(5, 4)
BATCHES, OTHERS = torch.ones(3, 6, 5), torch.ones(3, 5, 4)
ENDS = torch.tensor([1, 4, 6], dtype=torch.int32)


def counted(run: Callable[[], object]) -> int:
    """Return what torch counts of a run of ops that it knows."""
    with FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())


def by_groups() -> object:
    bounds = [0, *ENDS.tolist()]
    return [A[a:b] @ OTHERS[i] for i, (a, b) in enumerate(itertools.pairwise(bounds))]


@pytest.mark.parametrize(
    ("op", "args", "out", "same"),
    [
        (aten._grouped_mm.default, (A, OTHERS, ENDS), torch.ones(6, 4), by_groups),
        (aten._grouped_mm.default, (BATCHES, OTHERS), BATCHES @ OTHERS, lambda: BATCHES @ OTHERS),
        (
            aten._scaled_grouped_mm.default,
            (A, OTHERS, torch.ones(6), torch.ones(3, 4), ENDS),
            torch.ones(6, 4),
            by_groups,
        ),
        (
            # Three groups share out eight columns.
            aten._grouped_mm.default,
            (BATCHES, torch.ones(5, 8), torch.tensor([2, 5, 8], dtype=torch.int32)),
            torch.ones(6, 8),
            lambda: [BATCHES[i] @ torch.ones(5, n) for i, n in enumerate((2, 3, 3))],
        ),
        (
            # And here the inner dimension.
            aten._grouped_mm.default,
            (A.t(), torch.ones(6, 4), ENDS),
            torch.ones(3, 5, 4),
            lambda: [torch.ones(5, n) @ torch.ones(n, 4) for n in (1, 3, 2)],
        ),
        (
            aten.addbmm.default,
            (torch.ones(6, 4), BATCHES, OTHERS),
            torch.ones(6, 4),
            lambda: BATCHES @ OTHERS,
        ),
        (aten._int_mm.default, (A, B), torch.ones(6, 4), lambda: A @ B),
        (aten.mv.default, (A, torch.ones(5)), torch.ones(6), lambda: A @ torch.ones(5, 1)),
        (
            aten.addmv.default,
            (torch.ones(6), A, torch.ones(5)),
            torch.ones(6),
            lambda: A @ torch.ones(5, 1),
        ),
        (
            aten.dot.default,
            (torch.ones(5), torch.ones(5)),
            torch.ones(()),
            lambda: torch.ones(1, 5) @ torch.ones(5, 1),
        ),
        (
            aten._scaled_dot_product_flash_attention_for_cpu.default,
            (torch.ones(2, 4, 7, 8), torch.ones(2, 4, 9, 8), torch.ones(2, 4, 9, 8)),
            (torch.ones(2, 4, 7, 8),),
            lambda: torch.ones(2, 4, 7, 8) @ torch.ones(2, 4, 8, 9) @ torch.ones(2, 4, 9, 8),
        ),
        (
            aten.conv_depthwise3d.default,
            (torch.ones(1, 4, 6, 6, 6), torch.ones(4, 1, 3, 3, 3), [3, 3, 3], None),
            torch.ones(1, 4, 4, 4, 4),
            lambda: torch.conv3d(torch.ones(1, 4, 6, 6, 6), torch.ones(4, 1, 3, 3, 3), groups=4),
        ),
        (
            aten.mkldnn_rnn_layer.default,
            (torch.ones(5, 2, 3), torch.ones(16, 3), torch.ones(16, 4)),
            torch.ones(5, 2, 4),
            lambda: (
                [torch.ones(2, 3) @ torch.ones(3, 16) for _ in range(5)],
                [torch.ones(2, 4) @ torch.ones(4, 16) for _ in range(5)],
            ),
        ),
    ],
)
def test_an_op_counts_the_products_that_it_stands_for(
    op: Any, args: tuple[Any, ...], out: Any, same: Callable[[], object]
) -> None:
    assert flops_of(op, args, {}, out) == counted(same)


def test_what_torch_knows_is_as_torch_says() -> None:
    found = flops_of(aten.mm.default, (A, B), {}, A @ B)
    assert found == flop_registry[aten.mm](A, B, out_val=A @ B) == 2 * 6 * 5 * 4


def test_attention_backward_is_two_and_a_half_times_the_way_there() -> None:
    query = torch.ones(2, 4, 7, 8)
    op = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    found = flops_of(op, (query, query, query, query), {}, (query,))
    there = flops_of(forward, (query, query, query), {}, (query,))
    assert found is not None
    assert there is not None
    assert 2 * found == 5 * there


@pytest.mark.parametrize(
    ("run", "leading"),
    [
        (lambda x: torch.linalg.cholesky_ex(x @ x.mT + torch.eye(8)), 8**3 / 3),
        (torch.linalg.inv_ex, 2 * 8**3),
        (torch.fft.fft, 8 * 5 * 8 * 3),
        (lambda x: torch.linalg.solve_triangular(x, x[:, :2], upper=True), 8 * 8 * 2),
        (lambda x: torch.cdist(x, x, p=1.0), 3 * 8 * 8 * 8),
    ],
)
def test_factorizations_count_their_leading_term(
    run: Callable[[torch.Tensor], Any], leading: float
) -> None:
    seen: list[int] = []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            if func.overloadpacket not in flop_registry:
                seen.append(flops_of(func, args, kwargs or {}, result) or 0)
            return result

    with Count():  # type: ignore[no-untyped-call]  # torch leaves it untyped
        run(torch.ones(8, 8))
    assert sum(seen) == pytest.approx(leading, rel=0.25)


@pytest.mark.parametrize(
    "name", ["_grouped_mm", "linalg_multi_dot", "_sparse_mm", "lstm_cell", "_cslt_sparse_mm"]
)
def test_what_multiplies_is_never_costed_by_its_bytes_alone(name: str) -> None:
    packet = getattr(aten, name)
    assert is_heavy(getattr(packet, packet.overloads()[0]))


@pytest.mark.parametrize("name", ["add", "softmax", "embedding", "upsample_bilinear2d", "comma"])
def test_what_its_bytes_cost_is_no_heavy_op(name: str) -> None:
    class Op:
        overloadpacket = f"aten.{name}"

    assert not is_heavy(Op())


def test_an_op_without_a_formula_has_no_flops() -> None:
    assert flops_of(aten.add.Tensor, (A, A), {}, A) is None
