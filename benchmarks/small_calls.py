"""What calls cost beside their ops: compiled models with everything in memory beside the same models in eager.

    python -m benchmarks.small_calls [--toy] [--rounds N] [-o FILE]

Text of one sequence by ``generate``, training steps of small models, and the capture of a diffusers UNet beside
``torch.export`` alone. Eager and compiled take turns in one process on one thread; times are processor seconds of
it, of which other programs of the machine take no part, the best of the rounds. Results are compared, too.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import gascompile
from benchmarks.environment import headed, write_result
from gascompile.capture import export as own_export

_MACHINE = "cpu-nvme"
_PLENTY = "4GiB"


def text_models(*, toy: bool) -> dict[str, Callable[[], Any]]:
    """Return causal language models by name, with random weights."""
    import transformers

    kind: Any = transformers
    num_layers, width = (1, 32) if toy else (8, 256)
    ends: dict[str, Any] = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}

    def llama() -> Any:
        return kind.LlamaForCausalLM(kind.LlamaConfig(
            vocab_size=8000, hidden_size=width, intermediate_size=width * 8 // 3 // 8 * 8, dtype="float32",
            num_hidden_layers=num_layers, num_attention_heads=8, num_key_value_heads=4, **ends,
        ))  # fmt: skip

    def gpt2() -> Any:
        size = {"n_layer": num_layers, "n_embd": width, "vocab_size": 8000}
        return kind.GPT2LMHeadModel(kind.GPT2Config(n_head=8, dtype="float32", **size, **ends))

    return {f"Llama {num_layers} x {width}": llama, f"GPT-2 {num_layers} x {width}": gpt2}


def text(make: Callable[[], Any], folder: Path, *, rounds: int, num_tokens: int) -> dict[str, Any]:
    """Return the milliseconds of a token."""
    model = make().eval()
    ids = torch.randint(1, 8000, (1, 32))
    options = {"max_new_tokens": num_tokens, "do_sample": False}
    compiled = gascompile.compile(copy.deepcopy(model), _PLENTY, machine=_MACHINE, cache_dir=folder)

    def told(one: Any) -> list[int]:
        found: list[int] = one.generate(ids, attention_mask=torch.ones_like(ids), **options)[
            0
        ].tolist()
        return found

    try:
        return _compared(lambda: told(model), lambda: told(compiled), rounds, each=num_tokens)
    finally:
        compiled.close()


def step(
    width: int, depth: int, folder: Path, *, rounds: int, each: int, fused: bool | None
) -> dict[str, Any]:
    """Return the milliseconds of a step of a network of linear layers with AdamW.

    Args:
        width: of its layers.
        depth: how many there are.
        folder: of the cache.
        rounds: of which the best counts.
        each: steps of a round.
        fused: the kernel of eager's update: torch's default, which has one for all parameters, or the fused one,
            whose bits are those of a planned step.
    """
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(width, 1))
    ours = copy.deepcopy(model)
    batch = (torch.randn(16, width), torch.randn(16, 1))

    def loss_of(of: nn.Module, given: Any) -> torch.Tensor:
        return nn.functional.mse_loss(of(given[0]), given[1])

    own, others = (torch.optim.AdamW(m.parameters(), lr=1e-3, fused=fused) for m in (ours, model))

    def eager() -> list[float]:
        losses = []
        for _ in range(each):
            loss = loss_of(model, batch)
            loss.backward()
            others.step()
            others.zero_grad()
            losses.append(_told(loss, fused))
        return losses

    with gascompile.compile_step(
        ours, loss_of, own, _PLENTY, batch, machine=_MACHINE, cache_dir=folder
    ) as planned:
        return _compared(
            eager, lambda: [_told(planned(batch), fused) for _ in range(each)], rounds, each=each
        )


def _told(loss: torch.Tensor, fused: bool | None) -> float:
    """Return a loss; where eager's update rounds otherwise than the fused kernel does, to three digits."""
    return loss.item() if fused else float(f"{loss.item():.2e}")


def capture(folder: Path, *, toy: bool) -> dict[str, Any]:
    """Return the seconds of ``torch.export``, of a capture and of ``compile`` for a UNet like Stable Diffusion's."""
    import diffusers

    kind: Any = diffusers
    sizes: dict[str, Any] = {
        "block_out_channels": (16, 32, 32, 32), "cross_attention_dim": 32, "attention_head_dim": 8,
        "norm_num_groups": 8, "sample_size": 16, "layers_per_block": 1 if toy else 2,
    }  # fmt: skip
    if toy:
        sizes |= {
            "block_out_channels": (16,),
            "down_block_types": ("CrossAttnDownBlock2D",),
            "up_block_types": ("CrossAttnUpBlock2D",),
        }
    unet = kind.UNet2DConditionModel(**sizes).eval()
    given = {
        "sample": torch.randn(1, 4, 16, 16),
        "timestep": torch.tensor(3),
        "encoder_hidden_states": torch.randn(1, 7, 32),
        "return_dict": False,
    }
    with torch.no_grad():
        (wanted,) = unet(**given)
    begin_s = time.process_time()
    torch.export.export(unet, (), given, strict=False)
    export_s = time.process_time() - begin_s
    traced_s: list[float] = []
    trace = own_export.capture

    def timed(*args: Any, **kwargs: Any) -> Any:
        begin_s = time.process_time()
        found = trace(*args, **kwargs)
        traced_s.append(time.process_time() - begin_s)
        return found

    begin_s = time.process_time()
    with mock.patch.object(own_export, "capture", timed):
        compiled = gascompile.compile(unet, _PLENTY, given, machine=_MACHINE, cache_dir=folder)
    compile_s = time.process_time() - begin_s
    try:
        return {
            "export_s": export_s,
            "capture_s": sum(traced_s),
            "compile_s": compile_s,
            # [Empirical] On an EPYC, bits of a product of one row depend on where its operands lie, in eager as well.
            "equal": torch.allclose(compiled(**given)[0], wanted, rtol=1e-5, atol=1e-5),
        }
    finally:
        compiled.close()


def _compared(
    eager: Callable[[], Any], ours: Callable[[], Any], rounds: int, *, each: int
) -> dict[str, Any]:
    """Return the best milliseconds of both, and whether all that they returned was equal.

    The first calls are not timed: they plan, and what runs often is prepared for it.
    """
    equal = all(eager() == ours() for _ in range(2))
    best = [float("inf"), float("inf")]
    for _ in range(rounds):
        found = []
        for number, call in enumerate((eager, ours)):
            begin_s = time.thread_time()
            found.append(call())
            best[number] = min(best[number], time.thread_time() - begin_s)
        equal = equal and found[0] == found[1]
    eager_ms, ours_ms = (1e3 * value / each for value in best)
    return {"eager_ms": eager_ms, "ours_ms": ours_ms, "ratio": ours_ms / eager_ms, "equal": equal}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--toy", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--rounds", type=int, help="of which the best counts")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args(arguments)
    rounds = options.rounds or (1 if options.toy else 25)
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    result = headed("small_calls") | {"rounds": rounds, "rows": {}}
    rows: dict[str, dict[str, Any]] = result["rows"]
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for model, make in text_models(toy=options.toy).items():
                num_tokens = 4 if options.toy else 32
                rows[f"a token of {model}"] = text(
                    make, folder, rounds=rounds, num_tokens=num_tokens
                )
            sizes = ((8, 1),) if options.toy else ((16, 1), (32, 2), (64, 4), (256, 8), (512, 8))
            for (width, depth), fused in itertools.product(sizes, (None, True)):
                kernel = "fused AdamW" if fused else "AdamW"
                rows[f"a step of {depth} x {width}, {kernel}"] = step(
                    width, depth, folder, rounds=rounds, each=2 if options.toy else 10, fused=fused
                )
            result["capture"] = capture(folder, toy=options.toy)
    finally:
        torch.set_num_threads(threads)
    table = Table("", "eager ms", "compiled ms", "ratio", "equal")
    for row, found in rows.items():
        numbers = (f"{found[key]:.3f}" for key in ("eager_ms", "ours_ms", "ratio"))
        table.add_row(row, *numbers, str(found["equal"]))
    console = Console()
    console.print(table)
    console.print(
        "A UNet: export {export_s:.2f} s, capture {capture_s:.2f} s, compile {compile_s:.2f} s".format(
            **result["capture"]
        )
    )
    console.print(f"Written to {write_result(result, options.output)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
