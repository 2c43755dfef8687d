"""Optimizer states in 8 bits: how far training strays from float32, by code, and what coding costs.

    python -m benchmarks.state_accuracy [--toy] [-o FILE]

A small language model is trained on the text of this project by AdamW, whose states are coded and decoded after
every update: by this project's codes, by the same rounded to the nearest, and by tables as bitsandbytes has them
(dynamic tree quantisation, the largest value of each block of 256 kept in float32). All runs see the same batches.
For each the loss at the end and its mean distance from the run in float32 are listed. The seconds of coding are the
best of several runs over one piece, on one thread.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional

from benchmarks.environment import headed, write_result
from gascompile.runtime.kernels import state_codes
from gascompile.runtime.kernels.state_codes import BLOCK, DITHERS, SIGNED, UNSIGNED, Code

Form = Callable[[torch.Tensor, int], torch.Tensor]
"""Takes blocks of values and the number of the update; returns what is left of the values."""
_VOCABULARY = 2048
_CONTEXT = 96
_SMALLEST = 4096


class _Model(nn.Module):
    """Embeddings of pairs of characters, two layers of attention, tied weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, width)
        self.place = nn.Parameter(torch.randn(_CONTEXT, width) * 0.02)
        nn.init.normal_(self.embedding.weight, std=0.02)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        x = self.layers(self.embedding(tokens) + self.place[:length], mask=mask, is_causal=True)
        return functional.linear(self.norm(x), self.embedding.weight)


def dynamic_table(*, signed: bool) -> torch.Tensor:
    """Return the values of a dynamic tree code, sorted: seven decades, each twice as fine as the one below."""
    values = [0.0, 1.0]
    for decade in range(7):
        count = 2**decade if signed else 2 ** (decade + 1)
        edges = torch.linspace(0.1, 1, count + 1, dtype=torch.float64)
        means = ((edges[1:] + edges[:-1]) / 2 * 10.0 ** (decade - 6)).tolist()
        values += means + ([-mean for mean in means] if signed else [])
    return torch.tensor(sorted(values), dtype=torch.float32)


def by_table(table: torch.Tensor) -> Form:
    """Return the form that rounds to the nearest of ``table``, after division by a block's largest."""
    edges = (table[1:] + table[:-1]) / 2

    def coded(values: torch.Tensor, _: int) -> torch.Tensor:
        largest = values.abs().amax(dim=1, keepdim=True)
        scaled = values / torch.where(largest == 0, 1.0, largest)
        return table[torch.bucketize(scaled, edges)] * largest

    return coded


def by_bits(code: Code, *, dithered: bool) -> Form:
    """Return one of this project's forms."""

    def coded(values: torch.Tensor, step: int) -> torch.Tensor:
        state = torch.empty(state_codes.coded_bytes(values.numel()), dtype=torch.uint8)
        codes, scales = state_codes.parts(state)
        added = None
        if dithered:
            added = state_codes.dither(step).repeat(-(-values.numel() // DITHERS))[: values.numel()]
        state_codes.encode(values.clone(), codes, scales, code, added)
        return state_codes.decoded(state, values.numel(), code).view_as(values)

    return coded


def forms() -> dict[str, tuple[Form, Form]]:
    """Return what is compared: forms of the mean and of the mean of squares, by name."""
    mean = by_bits(SIGNED, dithered=False)
    return {
        "float32": ((lambda values, _: values), (lambda values, _: values)),
        "8 bits": (mean, by_bits(UNSIGNED, dithered=True)),
        "8 bits, to the nearest": (mean, by_bits(UNSIGNED, dithered=False)),
        "dynamic tables": (
            by_table(dynamic_table(signed=True)),
            by_table(dynamic_table(signed=False)),
        ),
    }


def train(
    mean_form: Form, square_form: Form, text: torch.Tensor, *, steps: int, seed: int
) -> list[float]:
    """Return the losses of a run."""
    torch.manual_seed(seed)
    model = _Model(64 if steps < 20 else 96)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    chosen = torch.Generator().manual_seed(seed)
    losses = []
    for step in range(1, steps + 1):
        starts = torch.randint(0, len(text) - _CONTEXT - 1, (4,), generator=chosen).tolist()
        batch = torch.stack([text[start : start + _CONTEXT + 1] for start in starts])
        loss = functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        for parameter, state in optimizer.state.items():
            if parameter.numel() >= _SMALLEST:
                for key, form in (("exp_avg", mean_form), ("exp_avg_sq", square_form)):
                    values = state[key].view(-1)
                    blocks = functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
                    values.copy_(form(blocks, step).view(-1)[: len(values)])
    return losses


def coding_ns(*, runs: int) -> dict[str, float]:
    """Return the nanoseconds per value of decoding and coding, each the best of ``runs``, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    added = state_codes.dither(1)
    values = torch.rand(DITHERS // BLOCK, BLOCK)
    scratch = torch.empty_like(values, dtype=torch.int32)
    found = {}
    for name, code in (("mean", SIGNED), ("mean of squares", UNSIGNED)):
        codes, scales = state_codes.parts(state_codes.coded(values.view(-1), code))
        dither = None if code.signed else added
        for what in ("decode", "encode"):
            best_s = float("inf")
            for _ in range(runs):
                begin_s = time.perf_counter()
                if what == "decode":
                    state_codes.decode(codes, scales, values, scratch, code)
                else:
                    state_codes.encode(values, codes, scales, code, dither)
                best_s = min(best_s, time.perf_counter() - begin_s)
            found[f"{what} {name}"] = best_s / DITHERS * 1e9
    torch.set_num_threads(threads)
    return found


def read_text() -> torch.Tensor:
    """Return the sources and pages of this project as tokens of two characters."""
    root = Path(__file__).parent.parent
    files = sorted([*root.glob("gascompile/*.py"), *root.glob("docs/*.md")])
    raw = torch.tensor(list(b"".join(file.read_bytes() for file in files)))
    return (raw[:-1] * 31 + raw[1:]) % _VOCABULARY


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison, print it and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--toy", action="store_true", help="a few steps, to see that it runs")
    parser.add_argument("-o", "--output", type=Path, help="the result file")
    options = parser.parse_args(arguments)
    steps, seeds = (6, (0,)) if options.toy else (200, (0, 1))
    # The last quarter; of a few steps all, whose losses may be equal by chance.
    text, tail = read_text(), max(steps // 4, min(steps, 8))
    rows: list[dict[str, str | int | float]] = []
    plain: dict[int, torch.Tensor] = {}
    for name, (mean_form, square_form) in forms().items():
        for seed in seeds:
            losses = torch.tensor(train(mean_form, square_form, text, steps=steps, seed=seed))
            plain.setdefault(seed, losses)
            away = (losses - plain[seed]).abs()[-tail:].mean()
            rows.append(
                {
                    "form": name,
                    "seed": seed,
                    "loss": float(losses[-tail:].mean()),
                    "mean_distance": float(away),
                }
            )
    table = Table("states", "seed", "loss", "distance from float32")
    for row in rows:
        table.add_row(
            str(row["form"]), str(row["seed"]), f"{row['loss']:.4f}", f"{row['mean_distance']:.4f}"
        )
    Console().print(table)
    costs_ns = coding_ns(runs=5 if options.toy else 200)
    Console().print({name: round(value, 2) for name, value in costs_ns.items()})
    result = {
        **headed("state_accuracy"),
        "steps": steps,
        "losses": rows,
        "coding_ns_per_value": costs_ns,
    }
    write_result(result, options.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
