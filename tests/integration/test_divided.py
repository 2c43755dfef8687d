"""Tables that exceed the whole budget: computed in tiles and gathered row by row, equal to eager."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import gascompile
from gascompile.core.machine import ComputeRate, Link, Machine, MemoryRate, Place
from gascompile.core.plan import Plan
from gascompile.core.tiles import parse_tile
from gascompile.integrations.generation import Generator
from gascompile.passes.verify.walk import verify
from gascompile.runtime.run.executor import Executor
from gascompile.runtime.run.session import Session
from tests.allocator import peak_growth_bytes

MIB = 1 << 20
VOCABULARY, WIDTH = 12_288, 256
TABLE_BYTES = 12 * MIB
"""Of one table in fp32: more than any budget here."""
BUDGET = 8 * MIB
MACHINE = Machine(
    name="test",
    places=(Place.named("cpu", 8 << 30), Place.named("nvme", 64 << 30)),
    links=(Link(source_tier="nvme", target_tier="cpu", bandwidth_bytes_per_s=1e9, latency_s=1e-4),),
    rates=(
        ComputeRate(device="cpu", dtype="float32", flops_per_s=5e10),
        ComputeRate(device="cpu", dtype="bfloat16", flops_per_s=5e10),
    ),
    memory=(MemoryRate(device="cpu", bandwidth_bytes_per_s=1e10, op_overhead_s=1e-6),),
)


class LanguageModel(nn.Module):
    """An embedding, a layer and an output layer, which may share the embedding's table."""

    def __init__(self, *, tied: bool = False, bias: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, padding_idx=3)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=bias)
        nn.init.normal_(self.embed.weight, std=0.1)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.embed(ids)
        return rows, self.head(torch.tanh(self.layer(rows)))


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(5))


def compile_it(
    model: nn.Module, ids: torch.Tensor, cache: Path, budget: int = BUDGET
) -> gascompile.CompiledModel:
    return gascompile.compile(
        model, budget, example_inputs=(ids,), machine=MACHINE, cache_dir=cache
    )


def tiled_weights(plan: Plan) -> set[str]:
    return {tile.base for tile in map(parse_tile, plan.tensors) if tile is not None}


CASES = {
    "one token": (False, False, (1, 1), torch.float32),
    "tied": (True, False, (1, 7), torch.float32),
    "bias": (False, True, (1, 7), torch.float32),
    "tied, bias, batch": (True, True, (3, 5), torch.float32),
    "bf16": (False, True, (2, 4), torch.bfloat16),
    "bf16, tied, one token": (True, False, (1, 1), torch.bfloat16),
}


@pytest.mark.parametrize(("tied", "bias", "shape", "dtype"), CASES.values(), ids=list(CASES))
def test_a_model_of_two_tables_runs_in_less_than_one(
    tied: bool, bias: bool, shape: tuple[int, ...], dtype: torch.dtype, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    model = LanguageModel(tied=tied, bias=bias).eval().to(dtype)
    budget = BUDGET if dtype == torch.float32 else BUDGET * 5 // 8
    assert budget < TABLE_BYTES * dtype.itemsize // 4
    ids = tokens(*shape)
    with torch.no_grad():
        rows, logits = model(ids)
    with compile_it(model, ids, tmp_path, budget) as compiled:
        plan = compiled.plan
        for _ in range(2):
            found_rows, found_logits = compiled(ids)
            assert torch.equal(found_rows, rows)
            tolerance = 1e-5 if dtype == torch.float32 else 2e-2
            torch.testing.assert_close(found_logits, logits, rtol=0, atol=tolerance)
        report, executor = compiled.last_run, compiled._gascompile.executor
        assert report is not None and executor is not None
        assert report.peak_bytes["cpu"] <= budget
        assert report.link_bytes["nvme->cpu"] == plan.link_bytes["nvme->cpu"]
        run_bytes = peak_growth_bytes(lambda: executor.run(ids))
        assert plan.arena_bytes["cpu"] + run_bytes <= plan.peak_bytes["cpu"] <= budget
        assert tiled_weights(plan) == {"embed.weight" if tied else "head.weight"}


def test_dynamic_tokens_and_repeated_ones(tmp_path: Path) -> None:
    model = LanguageModel(bias=True).eval()
    length = torch.export.Dim("length", min=2, max=16)
    compiled = gascompile.compile(
        model,
        BUDGET,
        example_inputs={"ids": tokens(1, 16)},
        dynamic_shapes={"ids": {1: length}},
        machine=MACHINE,
        cache_dir=tmp_path,
    )
    for ids in (tokens(1, 16), torch.full((1, 5), 11), tokens(1, 2)):
        with torch.no_grad():
            rows, logits = model(ids)
        found_rows, found_logits = compiled(ids)
        assert torch.equal(found_rows, rows)
        torch.testing.assert_close(found_logits, logits, rtol=0, atol=1e-5)


def test_more_rows_than_are_asked_for_together(tmp_path: Path) -> None:
    table = nn.Embedding(VOCABULARY, WIDTH).eval()
    ids = tokens(3, 700)
    with compile_it(table, ids, tmp_path) as compiled:
        assert torch.equal(compiled(ids), table(ids))
        assert compiled.last_run is not None
        assert compiled.last_run.link_bytes["nvme->cpu"] == ids.numel() * WIDTH * 4
        with pytest.raises(IndexError):
            compiled(ids + VOCABULARY)


@pytest.mark.parametrize("wrong", [VOCABULARY, -1])
def test_an_index_out_of_range_is_an_error_as_in_eager(wrong: int, tmp_path: Path) -> None:
    model, ids = LanguageModel().eval(), tokens(1, 4)
    beyond = ids.clone()
    beyond[0, 2] = wrong
    with pytest.raises(IndexError):
        model(beyond)
    compiled = compile_it(model, ids, tmp_path)
    with pytest.raises(IndexError, match=rf"index {wrong} .*'embed.weight' has {VOCABULARY} rows"):
        compiled(beyond)
    assert torch.equal(compiled(ids)[0], model(ids)[0])


def test_bundles_and_cached_plans_keep_the_tiles(tmp_path: Path) -> None:
    model, ids = LanguageModel(tied=True).eval(), tokens(1, 4)
    first = compile_it(model, ids, tmp_path / "cache")
    expected = first(ids)
    first.save(tmp_path / "bundle")
    first.close()
    again = compile_it(model, ids, tmp_path / "cache")
    loaded = gascompile.load(tmp_path / "bundle", any_machine=True)
    for compiled in (again, loaded):
        assert compiled.plan == first.plan
        verify(compiled.plan)
        for found, wanted in zip(compiled(ids), expected, strict=True):
            assert torch.equal(found, wanted)
        compiled.close()


def test_the_twin_without_overlap_gives_the_same_bits(tmp_path: Path) -> None:
    """The synchronous twin, which spoils what is released, gives the same bits as the executor."""
    model, ids = LanguageModel(bias=True).eval(), tokens(2, 3)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_file(dict(model.state_dict()), folder / "model.safetensors")
    compiled = gascompile.compile(
        model, BUDGET, (ids,), checkpoint=folder, machine=MACHINE, cache_dir=tmp_path / "cache"
    )
    expected = compiled(ids)
    plan, weights = compiled.plan, compiled.weights
    with Session.for_plan(
        plan, sources=weights.sources, stamps=weights.stamps, states=compiled.states
    ) as session:
        twin = Executor(session, compiled.graph_module, plan, overlap=False, paranoid=True)
        for found, wanted in zip(twin.run(ids), expected, strict=True):
            assert torch.equal(found, wanted)


def test_the_graph_reads_as_the_schedule(tmp_path: Path) -> None:
    model, ids = LanguageModel(tied=True).eval(), tokens(1, 4)
    compiled = compile_it(model, ids, tmp_path)
    code = compiled.graph_module.code
    num_tiles = sum(op.name.startswith("linear_1[") for op in compiled.plan.ops)
    assert num_tiles > 1
    assert code.count("linear_tile(") == num_tiles
    assert "gather(mover, 'embed.weight', ids)" in code


def test_generation_shares_tiles_between_prompt_and_answer(tmp_path: Path) -> None:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(2)
    model = transformers.LlamaForCausalLM(config).eval()
    prompt = tokens(1, 9)
    with torch.no_grad():
        expected = model.generate(prompt, max_new_tokens=6, do_sample=False)[0, 9:].tolist()
    table_bytes = VOCABULARY * 128 * 4
    with Generator(
        model, table_bytes, max_length=24, prefill_tokens=8, machine=MACHINE, cache_dir=tmp_path
    ) as generator:
        assert list(generator.stream(prompt, 6)) == expected
        assert generator.plans.keys() == {"decode", "prefill"}
        for name, plan in generator.plans.items():
            assert tiled_weights(plan) == {"lm.lm_head.weight"}, name
            assert generator.last_runs[name].peak_bytes["cpu"] <= table_bytes
