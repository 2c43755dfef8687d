"""Linear layers in parts on both processors: results as eager, budgets kept; what cannot be in parts stays whole."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import gascompile
from gascompile.bundles.check import check_program_of
from gascompile.core.errors import PlanMismatchError, UnsupportedOpError
from gascompile.core.machine import ComputeRate
from gascompile.core.plan import Plan
from gascompile.core.tiles import parse_tile
from gascompile.passes.explain.diff import diff
from gascompile.passes.explain.explain import OpExplanation, TensorExplanation, explain
from gascompile.passes.graph.divide import Division, divide
from gascompile.passes.graph.insert import insert
from gascompile.passes.search import stream as stream_pass
from gascompile.passes.search.site_choices import able_weights
from gascompile.passes.search.site_routes import closed
from gascompile.passes.search.sites import best_with
from gascompile.passes.verify.walk import verify
from gascompile.runtime.devices.emulated import EmulatedDevice
from gascompile.runtime.devices.pacing import Disorder
from gascompile.runtime.run.executor import Executor
from gascompile.runtime.run.session import Session
from tests.integration.site_models import HOST_BUDGET, eager, machine

WIDTH = 128
BUDGET = 200_000
"""Of the accelerator: it has room for half of each weight of a chain beside its values."""


class Chain(nn.Module):
    """Layers that need each other, so that no two of them run at once."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


class Mixed(nn.Module):
    """Sizes by chance; layers that share inputs, a weight, a bias; results that are changed, viewed and returned."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draws = random.Random(seed)
        self.width = w = 16 * draws.randint(2, 5)
        inner = 16 * draws.randint(2, 8)
        self.shape = [(draws.randint(1, 9), w), (2, draws.randint(1, 5), w)][draws.randint(0, 1)]
        self.query, self.key = nn.Linear(w, w), nn.Linear(w, w, bias=False)
        self.gate, self.up = nn.Linear(w, inner, bias=False), nn.Linear(w, inner)
        self.down = nn.Linear(inner, w)
        self.again = nn.Linear(w, w)
        self.again.weight = self.query.weight
        self.down.bias = self.again.bias
        self.head = nn.Linear(w, 48)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key = self.query(x), self.key(x)
        key += 1.0
        x = x + query.view(-1, self.width).reshape(x.shape) * torch.sigmoid(key)
        x = x + self.down(functional.silu(self.gate(x)) * self.up(x))
        last = self.again(x)
        return self.head(last)[..., 3:], last, self.gate(x).transpose(0, -1)


def compiled(
    model: nn.Module,
    cache: Path,
    budget: int,
    x: torch.Tensor,
    sites: str = "parts",
    rate: float = 1e8,
) -> gascompile.CompiledModel:
    where = machine(rate=rate)
    rates = tuple(dataclasses.replace(r, dtype="bfloat16") for r in where.rates)
    assert all(isinstance(r, ComputeRate) for r in rates)
    return gascompile.compile(
        model,
        gascompile.Budget(gpu=budget, cpu=HOST_BUDGET),
        example_inputs=(x,),
        machine=dataclasses.replace(where, rates=(*where.rates, *rates)),
        cache_dir=cache,
        sites=sites,
        fuse="off",
    )


def parts_by_site(plan: Plan) -> dict[str, set[str]]:
    """Return the layers that have a part at each site."""
    found: dict[str, set[str]] = {}
    for op in plan.ops:
        tile = parse_tile(op.name)
        if tile is not None:
            found.setdefault(op.site, set()).add(tile.base)
    return found


@pytest.fixture(scope="module")
def x() -> torch.Tensor:
    return torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def chain() -> Chain:
    torch.manual_seed(1)
    return Chain().eval()


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the plan of ``halved`` is kept."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def halved(chain: Chain, x: torch.Tensor, kept: Path) -> gascompile.CompiledModel:
    return compiled(chain, kept, BUDGET, x)


def test_a_chain_takes_much_less_than_on_either_processor_and_gives_eagers_results(
    halved: gascompile.CompiledModel, chain: Chain, x: torch.Tensor, cache: Path
) -> None:
    plan = halved.plan
    layers = parts_by_site(plan)
    chained = {f"{name}{end}" for name in ("linear", "relu") for end in ("", "_1", "_2")}
    assert layers["gpu"] == layers["cpu"] == chained
    # Parts stay apart through what is behind a layer, where each side joins them for itself.
    assert not {"linear", "linear_1", "linear_2"}.intersection(op.name for op in plan.ops)
    joins = [(op.name, op.site) for op in plan.ops if op.name.endswith(f"[0:{WIDTH}]")]
    assert joins == [(f"relu{end}[0:{WIDTH}]", "cpu") for end in ("", "_1")]
    assert plan.warnings == ()
    # Either processor alone takes so long for the ops, whatever moves.
    alone_s = 3 * 2 * 16 * WIDTH * WIDTH / 1e9
    assert alone_s / plan.certificate.predicted_s >= 1.5
    assert 0 < plan.certificate.lower_bound_s <= plan.certificate.predicted_s
    for seed in range(3):
        given = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(halved(given), eager(chain, given))
    report = halved.last_run
    assert report is not None
    assert report.peak_bytes["gpu"] <= BUDGET
    assert set(report.site_s) == {"gpu", "cpu"}
    # What crosses are the host's parts of all results, and the accelerator's of those that another layer reads.
    moved = {link: count for link, count in report.link_bytes.items() if count}
    assert moved == {link: count for link, count in plan.link_bytes.items() if count}
    result_bytes = 16 * WIDTH * 4
    assert 2.5 * result_bytes <= moved["gpu->cpu"] + moved["cpu->gpu"] <= 3 * result_bytes


def test_whole_ops_stay_whole_where_that_is_asked(
    halved: gascompile.CompiledModel, chain: Chain, x: torch.Tensor, cache: Path
) -> None:
    with compiled(chain, cache, BUDGET, x, "all") as whole:
        assert not parts_by_site(whole.plan)
        assert not any(op.cuts for op in whole.plan.workload.ops)
        assert halved.plan.certificate.predicted_s < 0.95 * whole.plan.certificate.predicted_s
        found = diff(whole.plan, halved.plan)
        assert {site.op for site in found.sites} >= {"linear", "linear_1", "linear_2", "relu"}
    weight, join = explain(halved.plan, "layers.0.weight"), explain(halved.plan, "relu")
    assert isinstance(weight, TensorExplanation) and isinstance(join, OpExplanation)
    assert "2 parts" in weight.reason and "gpu" in weight.reason and "cpu" in weight.reason
    assert join.reads[0].name.startswith("%relu[0:")


def test_the_graph_shows_the_parts(halved: gascompile.CompiledModel) -> None:
    code = halved.graph_module.code
    assert "aten.cat.default" in code and "'layers.0.weight[" in code
    verify(halved.plan)


def test_a_bundle_and_the_plan_cache_give_the_same_parts_back(
    halved: gascompile.CompiledModel, chain: Chain, x: torch.Tensor, kept: Path, tmp_path: Path
) -> None:
    wanted = halved(x)
    halved.save(tmp_path / "bundle")
    loaded = gascompile.load(tmp_path / "bundle", cache_dir=kept, any_machine=True)
    for found in (compiled(chain, kept, BUDGET, x), loaded):
        with found:
            check_program_of(found.plan, found.program)
            assert (found.plan.ops, found.plan.steps) == (halved.plan.ops, halved.plan.steps)
            assert torch.equal(found(x), wanted)


def test_weights_that_change_between_calls_count(x: torch.Tensor, cache: Path) -> None:
    torch.manual_seed(4)
    model = Chain().eval()
    with compiled(model, cache, BUDGET, x) as both:
        both(x)
        with torch.no_grad():
            first, second = model.layers[0], model.layers[1]
            assert isinstance(first, nn.Linear) and isinstance(second, nn.Linear)
            first.weight.mul_(-2.0)  # both parts of it
            second.bias[WIDTH // 2 :] += 1.0
        torch.testing.assert_close(both(x), eager(model, x))
        assert parts_by_site(both.plan)["cpu"]


def test_a_llama_in_parts_gives_eagers_logits(cache: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(6)
    config = transformers.LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    tokens = torch.randint(96, (1, 16))
    with compiled(model, cache, 600_000, tokens, rate=2e8) as both:
        layers = parts_by_site(both.plan)
        assert len(layers["gpu"] & layers["cpu"]) >= 3
        assert both.plan.warnings == ()
        for _ in range(2):
            tokens = torch.randint(96, (1, 16))
            torch.testing.assert_close(both(tokens).logits, eager(model, tokens).logits)


# ---------------------------------------------------------------- any choice of parts and sites


@pytest.fixture
def any_parts(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let plans have parts that are drawn, at sites that are drawn, in place of those that make them fast."""

    def draw(seed: int) -> None:
        draws = random.Random(seed)

        def drawn(task: Any, _best_s: float, fits: Any, again: Any) -> Any:
            cuts: dict[str, tuple[int, ...]] = {}
            for op in task.workload.ops:
                if op.splits and op.cuts and draws.random() < 0.8:
                    weight, rows = next(iter(op.cuts.items()))
                    bounds = draws.sample(range(1, rows), draws.randint(1, 3))
                    cuts[weight] = tuple(sorted(bounds))
            divided = again(divide(task.workload, task.machine, Division(cuts=cuts)))
            able = able_weights(divided, "cpu")
            some = frozenset(i for i in able if draws.random() < 0.5)
            sent = closed(divided, some, "cpu") or closed(divided, frozenset(able), "cpu")
            return best_with(divided, "cpu", sent, math.inf, fits)[1]

        monkeypatch.setattr(stream_pass, "divide_layers", drawn)
        monkeypatch.setattr(stream_pass, "_CLEAR_GAIN", -math.inf)

    return draw


@pytest.mark.parametrize("seed", range(5))
def test_any_parts_at_any_sites_give_eagers_results(
    seed: int, cache: Path, any_parts: Callable[[int], None]
) -> None:
    any_parts(seed)
    torch.manual_seed(seed)
    dtype = torch.bfloat16 if seed % 3 == 2 else torch.float32
    model = Mixed(seed).eval().to(dtype)
    given = torch.randn(model.shape).to(dtype)
    with compiled(model, cache, 1 << 18, given, rate=1e9) as both:
        plan = both.plan
        names = {op.name for op in plan.ops}
        joined = {tile.base for name in names if (tile := parse_tile(name))}
        # Of what is between two layers the parts stay apart.
        assert joined and joined - names <= {"linear_2", "linear_3", "silu"}
        module, sources = insert(both.program, plan), both.weights
        # Copies that come as late as they may, in any order, show a wait that is missing.
        where = EmulatedDevice(
            plan.machine, disorder=Disorder(seed=seed, longest_delay_s=2e-3), late=True
        )
        with Session.for_plan(
            plan, sources=sources.sources, stamps=sources.stamps, states={}, device=where
        ) as session:
            executor = Executor(session, module, plan, paranoid=True)
            for _ in range(2):
                given = torch.randn(model.shape).to(dtype)
                for found, wanted in zip(executor.run(given), eager(model, given), strict=True):
                    assert found.stride() == wanted.stride()
                    torch.testing.assert_close(found, wanted)
        for found, wanted in zip(both(given), eager(model, given), strict=True):
            torch.testing.assert_close(found, wanted)


# ---------------------------------------------------------------- what stays whole


class Odd(nn.Module):
    """Layers that no processor may have a part of."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Linear(WIDTH, WIDTH)
        self.read = nn.Linear(WIDTH, WIDTH, bias=False)
        self.turned = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.apart = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
        self.table = nn.Embedding(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.plain(x)
        x = self.read(x) + self.read.weight.sum()
        x = functional.linear(x, self.turned.t())
        x = functional.linear(x, self.apart)
        x = functional.linear(self.table.weight, self.table.weight)[:8] + x
        return functional.linear(x, self.plain.weight * 2.0, self.bias)


def test_layers_whose_rows_are_not_theirs_alone_stay_whole(cache: Path) -> None:
    torch.manual_seed(5)
    model, given = Odd().eval(), torch.randn(8, WIDTH)
    with compiled(model, cache, 250_000, given, rate=1e7) as both:
        assert set().union(*parts_by_site(both.plan).values()) == set()
        torch.testing.assert_close(both(given), eager(model, given))


def test_of_a_model_of_many_shapes_no_layer_is_in_parts(chain: Chain, cache: Path) -> None:
    with gascompile.compile(
        chain,
        gascompile.Budget(gpu=BUDGET, cpu=HOST_BUDGET),
        example_inputs=(torch.zeros(16, WIDTH),),
        dynamic_shapes=({0: torch.export.Dim("rows", min=2, max=16)},),
        machine=machine(rate=1e8),
        cache_dir=cache,
        sites="parts",
    ) as one:
        assert {op.site for op in one.plan.ops} == {"gpu"}
        assert not any(op.cuts for op in one.plan.workload.ops)


def test_a_step_refuses_parts(chain: Chain) -> None:
    optimizer = torch.optim.SGD(chain.parameters(), lr=0.1)
    with pytest.raises(UnsupportedOpError, match="sites='all'"):
        gascompile.compile_step(
            chain, lambda _model, _batch: torch.zeros(()), optimizer, sites="parts"
        )


def test_parts_in_another_order_or_of_other_rows_are_refused(
    halved: gascompile.CompiledModel,
) -> None:
    plan = halved.plan
    names = [op.name for op in plan.ops]
    tile = parse_tile(names[0])
    assert tile is not None

    def renamed(new: str) -> Plan:
        ops = tuple(
            dataclasses.replace(op, name=new if op.name == names[0] else op.name) for op in plan.ops
        )
        specs = tuple(
            dataclasses.replace(op, name=new if op.name == names[0] else op.name)
            for op in plan.workload.ops
        )
        return dataclasses.replace(
            plan, ops=ops, workload=dataclasses.replace(plan.workload, ops=specs)
        )

    for begin, end in ((16, tile.end), (0, tile.end - 16), (0, 0)):
        with pytest.raises(PlanMismatchError, match="plan again"):
            insert(halved.program, renamed(f"linear[{begin}:{end}]"))
