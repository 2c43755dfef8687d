"""The ``gascompile`` command: thin verbs over the public functions.

Nothing heavy is imported before a verb runs, so that help and wrong usage answer at once.
"""

from __future__ import annotations

from typing import Annotated

import typer

from gascompile import __version__
from gascompile.commands.annotation import annotate
from gascompile.commands.cache import cache
from gascompile.commands.difference import diff_verb
from gascompile.commands.explanation import explain_verb
from gascompile.commands.exporting import export
from gascompile.commands.generating import generate
from gascompile.commands.machines import calibrate, doctor
from gascompile.commands.output import VerbGroup
from gascompile.commands.plans import plan
from gascompile.commands.reporting import report
from gascompile.commands.running import run
from gascompile.commands.simulation import simulate
from gascompile.commands.variation import whatif_verb
from gascompile.commands.verification import verify

app = typer.Typer(
    cls=VerbGroup,
    name="gascompile",
    help="Run PyTorch models that do not fit: plan ahead of time where every tensor lives and when it moves.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    epilog="Exit codes: 0 done, 1 the job failed, 2 wrong usage. Every verb takes --json.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gascompile {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    del version  # handled by its callback


app.command()(plan)
app.command()(annotate)
app.command("explain")(explain_verb)
app.command("whatif")(whatif_verb)
app.command()(run)
app.command()(generate)
app.command()(export)
app.command()(verify)
app.command()(simulate)
app.command()(report)
app.command("diff")(diff_verb)
app.command()(calibrate)
app.command()(doctor)
app.add_typer(cache, name="cache")


def main() -> None:
    """Run the command line; the entry point of the installed ``gascompile`` command."""
    app(prog_name="gascompile")
