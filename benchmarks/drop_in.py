"""What a compiled model costs in the place of a model: the four lines, sentences, text of a 1.1B Llama in fp32.

    python -m benchmarks.drop_in [--model FOLDER] [--toy] [PART ...]

Parts are ``lines`` (``from_pretrained``, ``compile``, a call: without ``checkpoint=``, and with it), ``calls`` (128
tokens beside eager, in turns), ``sentences`` (500 of 100 lengths), ``resident``, ``drafts``, ``rows`` and ``lengths``
(``generate``). Each runs in a process of its own and compares results with transformers'. Writes
``benchmarks/results/drop_in-<machine>-<date>.json`` with what was asked, and whether it holds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

import gascompile
from benchmarks.anonymous import PeakSampler
from benchmarks.asked import asked, show_parts
from benchmarks.environment import headed, write_result
from benchmarks.llama_checkpoint import SHAPE_1B, write_llama
from benchmarks.lora import PROCESS_BYTES
from gascompile.core.sizes import parse_size

_BUDGET, _PLENTY = "1.5GiB", "8GiB"
_TOY_BUDGETS = ("6MiB", "64MiB")
_TOY = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2000,
}
_LIMIT_S = 1800.0
# [Empirical] On an EPYC, bits of a product depend on where its operands lie, in eager as well.
_ROUNDING = 1e-5
_TURNS, _ROUNDS = 12, 15
"""Pairs of first results, and of texts in memory: single ones scatter by a third on an idle machine, and four pairs
cannot tell a difference of 5 %."""
_TOY_TURNS = 2
_CYCLE = 13  # tokens of a text that repeats itself


class Case:
    """A model folder, a place for caches and the budgets."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.model, self.folder, self.toy = options.model, options.folder, options.toy
        self.budget, self.plenty = _TOY_BUDGETS if options.toy else (_BUDGET, _PLENTY)
        self.way: str = options.way

    def eager(self) -> Any:
        """Return transformers' own model."""
        import transformers

        kind: Any = transformers.AutoModelForCausalLM
        model = kind.from_pretrained(self.model).eval()
        # Random weights may draw any token, and the end of the text is one.
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        return model

    def compiled(self, budget: str, **options: Any) -> Any:
        """Return the model of the folder within a budget, without values in memory."""
        import transformers

        kind: Any = transformers
        with torch.device("meta"):
            config = kind.AutoConfig.from_pretrained(self.model)
            model = kind.AutoModelForCausalLM.from_config(config).eval()
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        folder = self.folder / "cache"
        return gascompile.compile(model, budget, checkpoint=self.model, cache_dir=folder, **options)


def _ids(rows: int, tokens: int) -> torch.Tensor:
    return torch.randint(1, 2000, (rows, tokens), generator=torch.Generator().manual_seed(1))


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    begin_s = time.perf_counter()
    found = call()
    return found, time.perf_counter() - begin_s


def _in_turns(calls: Sequence[Callable[[], Any]], rounds: int) -> list[float]:
    """Return the median seconds of each call after one that is not timed."""
    for call in calls:
        call()
    seconds = [[_timed(call)[1] for call in calls] for _ in range(rounds)]
    return [sorted(of)[rounds // 2] for of in zip(*seconds, strict=True)]


def lines(case: Case) -> dict[str, Any]:
    """Return seconds from the first line to the first result, the process's memory and a checksum."""
    import transformers

    kind: Any = transformers.AutoModelForCausalLM
    batch = {"input_ids": _ids(1, 128)}
    with PeakSampler(files=True) as peak:
        begin_s = time.perf_counter()
        if case.way == "eager":
            model = kind.from_pretrained(case.model)
        elif case.way == "lines":
            model = kind.from_pretrained(case.model)
            model = gascompile.compile(model, case.budget, cache_dir=case.folder)
        else:
            with torch.device("meta"):
                model = kind.from_config(transformers.AutoConfig.from_pretrained(case.model))
            model = gascompile.compile(
                model.eval(), case.budget, checkpoint=case.model, cache_dir=case.folder
            )
        with torch.no_grad():
            logits = model(**batch).logits
        seconds = time.perf_counter() - begin_s
        peak_bytes = peak.take_peak_bytes()
    return {"first_s": seconds, "peak_bytes": peak_bytes, "sum": float(logits.double().sum())}


def calls(case: Case) -> dict[str, Any]:
    """Return the seconds of a call of 128 tokens, and of eager's between them."""
    model, compiled = case.eager(), case.compiled(case.budget)
    batch = {"input_ids": _ids(1, 128), "use_cache": False}
    with compiled, torch.no_grad():
        wanted, found_logits = model(**batch).logits, compiled(**batch).logits
        equal = float((found_logits - wanted).norm() / wanted.norm()) <= _ROUNDING
        rounds = 3 if case.toy else 9
        eager_s, ours_s = _in_turns((lambda: model(**batch), lambda: compiled(**batch)), rounds)
        limit_s = compiled.plan.certificate.limit_s
    found = {"eager_s": eager_s, "ours_s": ours_s, "limit_s": limit_s, "equal": equal}
    return found | asked("share of eager's speed", eager_s / ours_s, least=0.97)


def resident(case: Case) -> dict[str, Any]:
    """Return the seconds of text with everything in memory, beside transformers' own."""
    model, compiled = case.eager(), case.compiled(case.plenty)
    ids, count = _ids(1, 16), 8 if case.toy else 24
    with compiled:
        same, ours, eager = _texts(compiled, model, ids, count)
        eager_s, ours_s = _in_turns((eager, ours), 3 if case.toy else _ROUNDS)
    found = {"eager_s": eager_s, "ours_s": ours_s, "equal": same}
    return found | asked("share of eager's speed", eager_s / ours_s, least=1.0)


def _texts(
    compiled: Any, model: Any, ids: torch.Tensor, count: int | None, **options: Any
) -> tuple[bool, Callable[[], Any], Callable[[], Any]]:
    """Return whether both give the same text, and calls of both."""
    settings = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": count,
        "do_sample": False,
        **options,
    }

    def ours() -> Any:
        return compiled.generate(ids, **settings)

    def eager() -> Any:
        return model.generate(ids, **settings)

    return torch.equal(ours(), eager()), ours, eager


def drafts(case: Case) -> dict[str, Any]:
    """Return the seconds of a text that repeats itself, with and without drafts that are looked up in the prompt."""
    case.model = _repeating(case.model, case.folder / "repeating")
    model, compiled = case.eager(), case.compiled(case.budget)
    count = 8 if case.toy else 32
    ids = (torch.arange(4 * _CYCLE) % _CYCLE).reshape(1, -1)
    with compiled:
        same, plain, _ = _texts(compiled, model, ids, count)
        looked, fast, _ = _texts(compiled, model, ids, count, prompt_lookup_num_tokens=10)
        plain_s, fast_s = _in_turns((plain, fast), 3)
    found = {"plain_s": plain_s, "drafts_s": fast_s, "equal": same and looked}
    return found | asked("times as fast", plain_s / fast_s, least=2.5)


def _repeating(source: Path, folder: Path) -> Path:
    """Write a model of the same sizes that answers each of ``_CYCLE`` tokens with the next one."""
    shutil.copytree(source, folder)
    embedding = torch.empty(0)
    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        embedding = tensors.get("model.embed_tokens.weight", embedding)
        for name, value in tensors.items():
            if "o_proj" in name or "down_proj" in name:
                value.zero_()
            if name == "lm_head.weight":
                value[:_CYCLE] = embedding[:_CYCLE].roll(1, 0)
        save_file(tensors, file, metadata={"format": "pt"})
    return folder


def rows(case: Case) -> dict[str, Any]:
    """Return tokens per second of 32 rows and of one."""
    model, compiled = case.eager(), case.compiled(case.budget)
    many, count = 8 if case.toy else 32, 8
    with compiled:
        same_one, one, _ = _texts(compiled, model, _ids(1, 16), count)
        same_many, all_rows, _ = _texts(compiled, model, _ids(many, 16), count)
        one_s, many_s = _in_turns((one, all_rows), 3)
    found = {"one_s": one_s, "many_s": many_s, "rows": many, "equal": same_one and same_many}
    return found | asked("times the tokens/s", many * one_s / many_s, least=20.0)


def lengths(case: Case) -> dict[str, Any]:
    """Return the seconds of the same text with room for 256 tokens and for 8,192."""
    import transformers

    kind: Any = transformers
    size = {"num_hidden_layers": 8, "hidden_size": 256, "intermediate_size": 680}
    config = kind.LlamaConfig(
        vocab_size=8000, num_attention_heads=8, num_key_value_heads=4, dtype="float32",
        max_position_embeddings=8192, eos_token_id=None, pad_token_id=0, **size,
    )  # fmt: skip
    model = kind.LlamaForCausalLM(config).eval()
    ids, count = _ids(1, 16), 8 if case.toy else 128

    def stop(found: torch.Tensor, _scores: Any, **_options: Any) -> torch.Tensor:
        return torch.full((len(found),), found.shape[1] >= ids.shape[1] + count)

    stops = kind.StoppingCriteriaList([stop])
    compiled = gascompile.compile(model, "1GiB", cache_dir=case.folder / "cache")
    with compiled:
        texts = [
            _texts(compiled, model, ids, None, max_length=most, stopping_criteria=stops)
            for most in (256, 8192)
        ]
        short_s, long_s = _in_turns([ours for _, ours, _ in texts], 3 if case.toy else 15)
    found = {"short_s": short_s, "long_s": long_s, "equal": all(same for same, _, _ in texts)}
    return found | asked("times the seconds", long_s / short_s, most=1.05)


def sentences(case: Case) -> dict[str, Any]:
    """Return the seconds of 500 sentences of 100 lengths by a 91 MB encoder in 64 MiB, beside eager's."""
    import transformers
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules

    kind: Any = transformers
    words = [f"w{number}" for number in range(200 if case.toy else 30000)]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    folder = case.folder / "encoder"
    folder.mkdir(exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join([*special, *words]))
    kind.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    layers = 1 if case.toy else 6
    config = kind.BertConfig(
        vocab_size=len(words) + 5, hidden_size=384, num_hidden_layers=layers, intermediate_size=1536,
        num_attention_heads=12,
    )  # fmt: skip
    kind.BertModel(config).save_pretrained(folder)
    encoder: Any = modules.Transformer(str(folder))
    pooling = modules.Pooling(encoder.get_embedding_dimension())
    model = SentenceTransformer(modules=[encoder, pooling], device="cpu")
    own = encoder.model
    count, most = (20, 5) if case.toy else (500, 100)
    texts = [" ".join(words[(7 * i + j) % len(words)] for j in range(1 + i % most)) for i in range(count)]  # fmt: skip
    compiled = gascompile.compile(
        kind.BertModel.from_pretrained(folder), "64MiB", cache_dir=case.folder / "cache"
    )

    def by(one: Any) -> Any:
        encoder.model = one
        return model.encode(texts)

    with compiled:
        difference = float(abs(by(compiled) - by(own)).max())
        eager_s, ours_s = _in_turns((lambda: by(own), lambda: by(compiled)), 3)
        num_plans = len(compiled._gascompile.units)
    found = {"eager_s": eager_s, "ours_s": ours_s, "difference": difference, "plans": num_plans}
    found["equal"] = difference <= 1e-5 and num_plans <= 4
    return found | asked("times eager's seconds", ours_s / eager_s, most=1.3)


_PARTS: dict[str, Callable[[Case], dict[str, Any]]] = {
    part.__name__: part for part in (lines, calls, sentences, resident, drafts, rows, lengths)
}


def _run(part: str, options: argparse.Namespace, folder: Path, way: str = "") -> dict[str, Any]:
    """Run a part in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.drop_in", part, "--model", str(options.model)]
    command += ["--folder", str(folder), "--way", way or part, *(["--toy"] * options.toy)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    if done.returncode:
        return {"error": done.stderr.strip()[-2000:], "holds": False}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _first_lines(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the four lines, and those with ``checkpoint=``, in turns, without a plan in the cache.

    Either begins every other time. Seconds are compared by their medians.
    """
    eager = _run("lines", options, folder, "eager")
    found: dict[str, list[dict[str, Any]]] = {"lines": [], "checkpoint": []}
    for number in range(_TOY_TURNS if options.toy else _TURNS):
        for way in sorted(found, reverse=bool(number % 2)):
            place = folder / f"{way}{number}"
            place.mkdir()
            found[way].append(_run("lines", options, place, way))
    if any("error" in one for one in (eager, *found["lines"], *found["checkpoint"])):
        return {**found, "eager": eager, "holds": False}
    limit_bytes = parse_size(_TOY_BUDGETS[0] if options.toy else _BUDGET) + PROCESS_BYTES
    first_s, named_s = (
        statistics.median(one["first_s"] for one in runs) for runs in found.values()
    )
    kept = all(one["peak_bytes"] <= limit_bytes for one in found["lines"])
    sums = [one["sum"] / eager["sum"] for runs in found.values() for one in runs]
    equal = max(abs(one - 1) for one in sums) <= _ROUNDING
    result = {**found, "eager": eager, "limit_bytes": limit_bytes, "kept": kept, "equal": equal}
    return result | asked("times the seconds with checkpoint=", first_s / named_s, most=1.0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the result; 0 where all holds and all results are the same."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(_PARTS)}")
    parser.add_argument("--model", type=Path, help="a Llama folder; by default random weights")
    parser.add_argument("--folder", type=Path, help="where model and caches are made")
    parser.add_argument("--toy", action="store_true", help="a tiny model, to try the script")
    parser.add_argument("-o", "--output", type=Path, help="result file")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if unknown := set(options.parts) - set(_PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    if options.way:
        torch.manual_seed(0)
        print(json.dumps(_PARTS[options.parts[0]](Case(options))), flush=True)
        return 0
    result = headed("drop_in") | {"load": os.getloadavg()[0], "parts": {}}
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        if options.model is None:
            options.model = write_llama(folder / "model", _TOY if options.toy else SHAPE_1B)
        for part in options.parts or _PARTS:
            run = _first_lines if part == "lines" else _run
            arguments_of = (options, folder) if part == "lines" else (part, options, folder)
            result["parts"][part] = run(*arguments_of)
    show_parts("In the place of a model", result["parts"], Console(highlight=False))
    if not options.toy or options.output:
        print(f"written: {write_result(result, options.output)}")
    found = result["parts"].values()
    return 0 if all(part["holds"] and part.get("equal") for part in found) else 1


if __name__ == "__main__":
    sys.exit(main())
