"""A Llama of 1.1B weights from a GGUF file of Q4_K and Q6_K blocks: bytes, seconds and errors.

``python -m benchmarks.gguf_weights MODEL FOLDER`` writes ``FOLDER/model.gguf`` from the safetensors folder ``MODEL``
unless it is there, and ``benchmarks/results/gguf_weights-<machine>-<date>.json``. Logits are compared with those of
transformers' eager model in fp32 on the same blocks as the ``gguf`` package decodes them, and with those of the weights
before they were packed. The packing here is plain rounding: what is measured is reading, not how well a file was made.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import gascompile
from benchmarks.environment import headed, write_result

TOKENS = (1, 128)
BUDGETS = ("1.5GiB", "300MiB")
_KINDS = gguf.GGMLQuantizationType


def q4_k(values: torch.Tensor) -> torch.Tensor:
    """Return a float32 matrix as Q4_K blocks, each run of 32 values rounded between its least and its largest."""
    blocks = values.reshape(-1, 8, 32)
    least = blocks.amin(-1).clamp(max=0)
    steps, minima = (blocks.amax(-1) - least) / 15, -least
    d, dmin = ((part.amax(-1, keepdim=True) / 63).half() for part in (steps, minima))
    scale, minimum = (
        (part / whole.float().clamp(min=1e-12)).round().clamp(0, 63)
        for part, whole in ((steps, d), (minima, dmin))
    )
    step = (d.float() * scale).unsqueeze(-1).clamp(min=1e-12)
    q = ((blocks + (dmin.float() * minimum).unsqueeze(-1)) / step).round().clamp(0, 15).byte()
    scale, minimum = scale.byte(), minimum.byte()
    coded = torch.cat(
        (
            scale[:, :4] | (scale[:, 4:] >> 4 << 6),
            minimum[:, :4] | (minimum[:, 4:] >> 4 << 6),
            (scale[:, 4:] & 15) | (minimum[:, 4:] & 15) << 4,
        ),
        dim=-1,
    )
    packed = (q[:, 0::2] | q[:, 1::2] << 4).reshape(-1, 128)
    halves = torch.cat((d, dmin), dim=-1).view(torch.uint8)
    return torch.cat((halves, coded, packed), dim=-1).reshape(values.shape[0], -1)


def q6_k(values: torch.Tensor) -> torch.Tensor:
    """Return a float32 matrix as Q6_K blocks, 16 values to a scale."""
    groups = values.reshape(-1, 16, 16)
    steps = groups.abs().amax(-1) / 31
    d = (steps.amax(-1, keepdim=True) / 127).half()
    scale = (steps / d.float().clamp(min=1e-12)).round().clamp(1, 127)
    step = (d.float() * scale).unsqueeze(-1).clamp(min=1e-12)
    q = ((groups / step).round().clamp(-32, 31) + 32).byte().reshape(-1, 2, 4, 32)
    lower = torch.stack(
        (q[:, :, 0] & 15 | (q[:, :, 2] & 15) << 4, q[:, :, 1] & 15 | (q[:, :, 3] & 15) << 4), 2
    )
    upper = (
        q[:, :, 0] >> 4 | (q[:, :, 1] >> 4) << 2 | (q[:, :, 2] >> 4) << 4 | (q[:, :, 3] >> 4) << 6
    )
    parts = (
        lower.flatten(1),
        upper.flatten(1),
        scale.to(torch.int8).view(torch.uint8),
        d.view(torch.uint8),
    )
    return torch.cat(parts, dim=-1).reshape(values.shape[0], -1)


def write_file(model: Path, file: Path) -> None:
    """Write the GGUF file of a folder with a Llama, as llama.cpp's converter and a Q4_K_S quantiser would."""
    config = json.loads((model / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for shard in sorted(model.glob("*.safetensors")):
        with safe_open(shard, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - no mapping
                values = tensors.get_tensor(name).float()
                known = table.get_name(name, try_suffixes=(".weight",))
                assert known is not None, name
                for part, count in (("attn_q", heads), ("attn_k", kv_heads)):
                    if f".{part}." in known:
                        rows = values.view(count, 2, -1, values.shape[1])
                        values = rows.swapaxes(1, 2).reshape(values.shape)
                if values.dim() == 1:
                    writer.add_tensor(known, values.numpy())
                elif known == "output.weight":
                    writer.add_tensor(known, q6_k(values).numpy(), raw_dtype=_KINDS.Q6_K)
                else:
                    writer.add_tensor(known, q4_k(values).numpy(), raw_dtype=_KINDS.Q4_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def inputs(tokens: int) -> dict[str, Any]:
    """Return the arguments of a call."""
    generator = torch.Generator().manual_seed(1)
    return {
        "input_ids": torch.randint(0, 2000, (1, tokens), generator=generator),
        "use_cache": False,
    }


def eager(source: Path, target: Path) -> None:
    """Keep the logits of transformers' model in fp32, of a folder or of a GGUF file."""
    is_file = source.is_file()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source.parent if is_file else source,
        dtype=torch.float32,
        **({"gguf_file": source.name} if is_file else {}),
    ).eval()
    with torch.no_grad():
        save_file({str(n): model(**inputs(n)).logits.contiguous() for n in TOKENS}, target)


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the norm of the difference over that of what is wanted."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def measure(file: Path, folder: Path, budget: str, runs: int) -> list[dict[str, Any]]:
    """Return what each number of tokens took at one budget, and how far its logits are from eager's."""
    decoded, original = (load_file(folder / f"{name}.safetensors") for name in ("decoded", "exact"))
    rows = []
    with gascompile.compile(file, budget, cache_dir=folder / "cache") as compiled:
        for tokens in TOKENS:
            times_s, logits = [], compiled(**inputs(tokens)).logits
            for _ in range(runs):
                start_s = time.perf_counter()
                logits = compiled(**inputs(tokens)).logits
                times_s.append(time.perf_counter() - start_s)
            report = compiled.last_run
            assert report is not None
            rows.append({
                "budget": budget, "tokens": tokens, "times_s": times_s, "median_s": statistics.median(times_s),
                "predicted_s": compiled.plan.certificate.predicted_s, "link_bytes": dict(report.link_bytes),
                "peak_bytes": dict(report.peak_bytes), "size_bytes": dict(compiled.format_report.size_bytes),
                "to_decoded": error(logits, decoded[str(tokens)]), "to_original": error(logits, original[str(tokens)]),
                "decoded_to_original": error(decoded[str(tokens)], original[str(tokens)]),
            })  # fmt: skip
    return rows


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--budgets", nargs="+", default=list(BUDGETS))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--eager", help=argparse.SUPPRESS)
    options = parser.parse_args()
    file = options.folder / "model.gguf"
    if options.eager:
        source = file if options.eager == "decoded" else options.model
        eager(source, options.folder / f"{options.eager}.safetensors")
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        write_file(options.model, file)
    for name in ("decoded", "exact"):
        if not (options.folder / f"{name}.safetensors").exists():
            command = [sys.executable, "-m", "benchmarks.gguf_weights", *sys.argv[1:3]]
            subprocess.run([*command, "--eager", name], check=True)
    rows = [
        row
        for budget in options.budgets
        for row in measure(file, options.folder, budget, options.runs)
    ]
    sizes = {tensor.name: int(tensor.n_bytes) for tensor in gguf.GGUFReader(file).tensors}
    found = {
        **headed("gguf_weights"),
        "file_bytes": file.stat().st_size,
        "tensor_bytes": sum(sizes.values()),
        "table_bytes": sizes["token_embd.weight"],
        "rows": rows,
    }
    for row in rows:
        print(json.dumps(row))
    write_result(found, None)


if __name__ == "__main__":
    main()
