"""``generate``: text of a language model that may be larger than its budget, shown as it comes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from gascompile.commands import options as opt
from gascompile.commands.output import emit, fields, note, reserved_stdout
from gascompile.commands.summary import sizes
from gascompile.core.errors import CheckpointError
from gascompile.core.sizes import format_size, format_time

Folder = Annotated[
    Path,
    typer.Argument(metavar="DIR", help="Hugging Face directory with weights.", show_default=False),
]
Prompt = Annotated[
    str | None, typer.Option("--prompt", "-p", metavar="TEXT", help="What the text begins with.")
]
PromptIds = Annotated[
    str | None,
    typer.Option("--prompt-ids", metavar="N,N", help="Tokens, where there is no tokenizer."),
]
Chat = Annotated[
    bool, typer.Option("--chat", help="Take the prompt for a user's turn, by the chat template.")
]
MaxNew = Annotated[
    int,
    typer.Option(
        "--max-new-tokens", "-n", min=1, max=1 << 24, metavar="N", help="At most so many."
    ),
]
Sample = Annotated[bool, typer.Option("--sample", help="Draw tokens instead of the likeliest.")]
Temperature = Annotated[
    float | None,
    typer.Option("--temperature", min=1e-6, max=1e6, help="Of drawn tokens; 1 by default."),
]
TopK = Annotated[
    int | None,
    typer.Option(
        "--top-k", min=0, max=1 << 31, help="Draw from so many, by default 50; 0: from all."
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(
        "--top-p", min=1e-6, max=1.0, help="Draw from this share of what is likely, by default all."
    ),
]
Beams = Annotated[int, typer.Option("--beams", min=1, max=1024, help="Texts to follow at once.")]
Seed = Annotated[
    int | None, typer.Option("--seed", min=0, max=(1 << 63) - 1, help="Of drawn tokens.")
]


def generate(
    folder: Folder,
    prompt: Prompt = None,
    prompt_ids: PromptIds = None,
    chat: Chat = False,
    budget: opt.BudgetSize = None,
    cpu: opt.CpuSize = None,
    nvme: opt.NvmeSize = None,
    machine: opt.MachineName = None,
    max_new_tokens: MaxNew = 64,
    sample: Sample = False,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    beams: Beams = 1,
    seed: Seed = None,
    weights: opt.WeightForm = None,
    time_limit: opt.TimeLimit = 20.0,
    cache_dir: opt.CacheDir = None,
    json: opt.JsonFlag = False,
) -> None:
    """Generate text by transformers' own loop within a budget, and report what was measured.

    Example: [bold]gascompile generate Llama-3.2-1B/ --prompt "Once upon a time" --budget 1.5GiB[/bold]
    """
    if (prompt is None) == (prompt_ids is None):
        raise typer.BadParameter("give either --prompt TEXT or --prompt-ids 1,2,3")
    if chat and prompt is None:
        raise typer.BadParameter("--chat takes a --prompt, which it puts into the chat template")
    drawn = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    said = [name for name, value in {**drawn, "seed": seed}.items() if value is not None]
    if said and not sample:
        option = said[0].replace("_", "-")
        raise typer.BadParameter(f"--{option} is of drawn tokens; give --sample as well")
    usual = {"temperature": 1.0, "top_k": 50, "top_p": 1.0}
    drawn = {n: usual[n] if v is None else v for n, v in drawn.items()} if sample else {}
    mode = {"do_sample": sample, "num_beams": beams, "max_new_tokens": max_new_tokens, **drawn}
    with reserved_stdout(json):
        # Beams are known at the end alone.
        live = not json and beams == 1
        ids, decode = _read(folder, prompt, prompt_ids, chat=chat)
        data = _generated(
            opt.Asked(
                source=str(folder),
                limits=opt.Limits(budget, cpu, nvme),
                machine=machine,
                cache_dir=opt.cache_dir_of(cache_dir),
                time_limit_s=time_limit,
                weights=weights,
            ),
            (ids, decode),
            mode,
            seed=seed,
            live=live,
        )
    emit(json, data, *([] if live else [note(data["text"])]), note(""), _measured(data))


def _read(folder: Path, prompt: str | None, prompt_ids: str | None, *, chat: bool) -> Any:
    """Return a row of tokens, and what shows tokens."""
    import torch

    from gascompile.integrations.text import prompt_tokens, tokenizer_of

    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no directory; name one with a config.json and weights")
    if prompt_ids is not None:
        try:
            tokens = [int(part) for part in prompt_ids.replace(",", " ").split()]
        except ValueError as error:
            raise typer.BadParameter(
                f"--prompt-ids are numbers apart by commas: {error}"
            ) from error
        if not tokens or not all(0 <= token < 1 << 31 for token in tokens):
            raise typer.BadParameter("--prompt-ids are numbers of tokens, 0 and more")
        return torch.tensor([tokens]), lambda new: " ".join(map(str, new)) + " " * bool(new)
    assert prompt is not None
    tokenizer = tokenizer_of(folder)
    with opt.usage_errors():
        ids = prompt_tokens(tokenizer, prompt, chat=chat)
    return ids, lambda new: str(tokenizer.decode(new, skip_special_tokens=True))


def _generated(
    asked: opt.Asked,
    prompt: Any,
    mode: dict[str, Any],
    *,
    seed: int | None,
    live: bool,
) -> dict[str, Any]:
    import torch

    from gascompile.api.compile import compile as compile_model
    from gascompile.integrations.text import TextWatch

    ids, decode = prompt
    machine, budget = asked.target()
    with opt.usage_errors():
        compiled: Any = compile_model(asked.source, budget, machine=machine, **asked.config)
    with compiled:
        _require_tokens(compiled, ids)
        watch = TextWatch(
            lambda: compiled.last_run, _printed if live else lambda text: None, decode
        )
        if seed is not None:
            torch.manual_seed(seed)
        single = {"streamer": watch} if mode["num_beams"] == 1 else {}
        row = compiled.generate(ids, attention_mask=torch.ones_like(ids), **mode, **single)[0]
        tokens = row[ids.shape[1] :].tolist()
        plan = compiled.plan
        figures = (
            watch.figures()
            if single
            else {"new_tokens": len(tokens), "peak_bytes": dict(compiled.last_run.peak_bytes)}
        )
    return {
        "model": type(compiled).__name__,
        "prompt_tokens": ids.shape[1],
        "tokens": tokens,
        "text": decode(tokens),
        "budget_bytes": dict(plan.budget_bytes),
        **figures,
    }


def _require_tokens(compiled: Any, ids: Any) -> None:
    """Refuse what generates no text, and tokens that the model does not know."""
    if not hasattr(compiled, "generate"):
        raise CheckpointError(
            f"{type(compiled).__name__} generates no text; run it: gascompile run"
        )
    known = getattr(compiled.config.get_text_config(), "vocab_size", None)
    if known is not None and not bool(((ids >= 0) & (ids < known)).all()):
        raise CheckpointError(
            f"the prompt has tokens that are not in 0 to {known - 1}, the model's"
        )


def _printed(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _measured(data: dict[str, Any]) -> RenderableType:
    rows = [("tokens", f"{data['new_tokens']} after {data['prompt_tokens']} of prompt")]
    if data.get("first_token_s") is not None:
        rows.append(
            (
                "first token",
                f"{format_time(data['first_token_s'])}, with plans that were not kept yet",
            )
        )
    if data.get("tokens_per_s") is not None:
        rows.append(("speed", f"{data['tokens_per_s']:.3g} tokens/s"))
    if data.get("bytes_per_token") is not None:
        rows.append(("moved / token", format_size(data["bytes_per_token"])))
    rows.append(
        (
            "peak",
            f"{sizes(data['peak_bytes'])}, beside keys and values; budget {sizes(data['budget_bytes'])}",
        )
    )
    return fields("Measured", rows)
