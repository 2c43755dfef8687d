"""Names that code asks for by a text are read off it; whoever is not sure of one has asked for any."""

# ruff: noqa: B009  # what is asked that way is what this is about

from __future__ import annotations

import ast
import builtins
import random
from collections.abc import Callable
from typing import Any

import pytest

from gascompile.capture.fingerprint.code_names import codes_in, names_of
from gascompile.capture.fingerprint.literal_names import literal_names

NAME = "third"

TEXTS: list[tuple[Callable[..., Any], set[str]]] = [
    (lambda x: getattr(x, "first"), {"first"}),
    (lambda x: getattr(x, "first", None), {"first"}),
    (lambda x, y: getattr(x, "first", y.rest(1, k=2) + 3), {"first", "rest"}),
    (lambda x: hasattr(x.part, "first") and x.first, {"first", "part"}),
    (lambda x: getattr(x.made(2)[0], "first", [1, 2]), {"first", "made"}),
    (lambda x: getattr(getattr(x, "first"), "second"), {"first", "second"}),
    (lambda x: getattr(x, "first", getattr(x, "second", 0)), {"first", "second"}),
    (lambda x: x.part + getattr(x, "first"), {"first", "part"}),
    (lambda x: [getattr(y, "first", 0) for y in x], {"first"}),
    (lambda x: print(getattr(x, "first"), len(x)), {"first"}),
]

OTHERS: list[Callable[..., Any]] = [
    lambda x, y: getattr(x, y) + 1,
    lambda x, y: getattr(x, y, "first"),
    lambda x, y: getattr(x, "first" + y),
    lambda x: getattr(x, "first".lower()),
    lambda x, y: getattr(x, "first" if y else "second"),
    lambda x, y: getattr(x, "first", 1 if y else 2),
    lambda x, y: getattr(x, y or "first"),
    lambda x, y: getattr(x, f"first{y}"),
    lambda x, y: getattr(x, ("first", "second")[y]),
    lambda x: getattr(x, NAME),
    lambda x: getattr(*x),
    lambda x: map(getattr, x, ["first"]),
    lambda x: (getattr, x, "first"),
    lambda x, y: (y or getattr)(x, "first"),
    lambda x: builtins.getattr(x, "first"),
    lambda x: getattr(x, "__dict__"),
    lambda x, y: getattr(x, "first") + getattr(x, y),
    lambda x: vars(x)["first"],
    lambda x: getattr.__call__(x, "first"),  # type: ignore[operator]
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(TEXTS)))
def test_texts_are_names(number: int) -> None:
    function, wanted = TEXTS[number]
    names = names_of(function.__code__)
    assert not names.by_name
    assert names.attributes == wanted


@pytest.mark.parametrize("number", range(len(OTHERS)))
def test_all_else_may_be_any_name(number: int) -> None:
    assert names_of(OTHERS[number].__code__).by_name


def expression(chance: random.Random, depth: int) -> str:
    """Return an expression at random, with calls of getattr and others in all places; none that Python leaves out."""
    if depth == 0:
        return chance.choice(["x", "y", "(1)", "'text'", "None", "x.part", "NAME"])

    def inner() -> str:
        return expression(chance, chance.randrange(depth))

    name = chance.choice(["'first'", "'second'", "'first'", inner()])
    forms = [
        f"getattr({inner()}, {name})",
        f"getattr({inner()}, {name}, {inner()})",
        f"hasattr({inner()}, {name})",
        f"f({inner()}, {inner()})",
        f"{chance.choice('xy')}.method({inner()})",
        f"(x + {inner()})",
        f"x[{inner()}]",
        f"({inner()} if y else {inner()})",
        f"(y or {inner()})",
        f"[{inner()}, {inner()}]",
        f"f({inner()}, key={inner()})",
        f"f(*{inner()})",
        f"[z for z in {inner()}]",
        f"(lambda: {inner()})()",
        f"-{inner()}",
        f"{inner()}.attribute",
        f"(not {inner()})",
        f"({inner()} < {inner()} < 3)",
        f"f({inner()})({inner()})",
        f"getattr(x, {name})({inner()})",
        f"getattr(getattr({inner()}, {name}), 'third')",
    ]
    return chance.choice(forms)


def asked(text: str) -> tuple[set[str], bool]:
    """Return what the syntax says: the texts, and whether all names that are asked for are texts."""
    names: set[str] = set()
    is_all = True
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in {"getattr", "hasattr"}:
            name = node.args[1]
            is_text = isinstance(name, ast.Constant) and isinstance(name.value, str)
            is_all = is_all and is_text
            if is_text:
                names.add(ast.literal_eval(name))
    return names, is_all


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
def test_what_is_read_off_the_code_is_what_its_syntax_says() -> None:
    num_read = 0
    for seed in range(1000):
        text = expression(random.Random(seed), 3)
        names, is_all = asked(text)
        found = [literal_names(inner) for inner in codes_in(compile(text, "<made>", "eval"))]
        if None not in found:
            assert is_all, text
            assert frozenset().union(*(inner or () for inner in found)) == names, text
            num_read += bool(names)
    assert num_read > 50
