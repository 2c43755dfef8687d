"""Calls the command line in this process, as tests of its verbs do."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner

from gascompile.cli import app


def run(*args: str) -> tuple[int, str, str]:
    """Return exit code, output and errors of ``gascompile`` with these arguments."""
    result = CliRunner().invoke(app, list(args), catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


def ok(*args: str) -> str:
    """Return the output of a call that succeeds."""
    code, out, err = run(*args)
    assert code == 0, err
    return out


def json_of(*args: str) -> Any:
    """Return the JSON of a call that succeeds."""
    return json.loads(ok(*args, "--json"))


def failure(*args: str) -> tuple[int, str]:
    """Return exit code and message, which are the same with and without --json."""
    code, out, err = run(*args)
    assert out.replace("the model's own print\n", "") == ""
    assert "Traceback" not in err
    json_code, json_out, _ = run(*args, "--json")
    assert json_code == code
    error = json.loads(json_out)["error"]
    assert error["type"]
    if code == 1:
        assert error["message"] in err
    return code, error["message"]
