"""Generation on an accelerator with next to no memory: weights of the drive wait half the way from token to token."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
import transformers

from gascompile.core.budget import Budget
from gascompile.core.machine import ComputeRate, IoSettings, MemoryRate
from gascompile.core.steps import Fetch
from gascompile.integrations.generation import Generator
from gascompile.passes.plan.make_plan import make_plan
from tests.greedy import eager_tokens
from tests.runtime.devices.machines import accelerator

KIB = 1024
MACHINE = dataclasses.replace(
    accelerator(up=8e8, nvme=1e8, io=IoSettings(num_threads=2, chunk_bytes=64 * KIB)),
    rates=(ComputeRate(device="gpu", dtype="float32", flops_per_s=5e10),),
    # As slow as twice the drive: loads and ops take turns where one weight fits.
    memory=(MemoryRate(device="gpu", bandwidth_bytes_per_s=2e8, op_overhead_s=1e-6),),
)
PROMPT = torch.arange(7, 15)
NUM_NEW, MAX_LENGTH = 6, 24


def llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=101,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def test_tokens_come_as_eagers_with_weights_half_the_way(tmp_path: Path) -> None:
    model = llama()
    expected = eager_tokens(model, PROMPT, NUM_NEW)
    # One or two weights fit beside the prompt's values, a third of all into what the host has for them.
    weights = sum(p.nbytes for p in model.parameters())
    budget = Budget(gpu=820 * KIB, cpu=MACHINE.io.staging_bytes + weights // 3)
    options: dict[str, Any] = {"max_length": MAX_LENGTH, "time_limit_s": 2.0}
    with Generator(
        model, budget, machine=MACHINE, cache_dir=tmp_path / "hops", **options
    ) as generator:
        plans = dict(generator.plans)
        for _ in range(2):
            assert list(generator.stream(PROMPT, NUM_NEW)) == expected
            for report in generator.last_runs.values():
                assert report.peak_bytes["gpu"] <= budget.limits_bytes(MACHINE)["gpu"]
                assert report.peak_bytes["cpu"] <= budget.limits_bytes(MACHINE)["cpu"]
    assert any(isinstance(step, Fetch) for step in plans["decode"].steps)
    assert not any(isinstance(step, Fetch) for step in plans["prefill"].steps)
    homes = {n: t.home for n, t in plans["decode"].tensors.items() if t.kind == "weight"}
    assert homes == {n: t.home for n, t in plans["prefill"].tensors.items() if t.kind == "weight"}
    decode = plans["decode"]
    plain = make_plan(
        decode.workload,
        MACHINE,
        Budget(decode.budget_bytes),
        fingerprint={},
        reserved_bytes=decode.reserved_bytes,
        has_hops=False,
        time_limit_s=2.0,
    )
    assert decode.certificate.predicted_s < plain.certificate.predicted_s
