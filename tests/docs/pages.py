"""Reads the project's Markdown: its code blocks, its links, its headings and the names it mentions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_NAME = re.compile(r"(?:`|\b)(\w+)\.((?:\w+\.)?_?\w+)(?:`|$)", re.MULTILINE)
_PATH = re.compile(r"`([\w./-]+/[\w.-]+\.(?:py|md|json|toml))`")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block of code and where it stands."""

    language: str
    code: str
    line: int


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(language=m[1], code=m[2], line=text.count("\n", 0, m.start()) + 1)
        for m in _FENCE.finditer(text)
    ]


def links(page: Path) -> list[str]:
    """Return the targets of a page's links, references included."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    return [*_LINK.findall(text), *re.findall(r"^\[\d+\]: (\S+)$", text, re.MULTILINE)]


def anchors(page: Path) -> set[str]:
    """Return the anchors that a page's headings make, as GitHub names them."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        for heading in _HEADING.findall(text)
    }


def paths(page: Path) -> list[str]:
    """Return the files of the repository that a page names in backticks."""
    return _PATH.findall(page.read_text(encoding="utf-8"))


def names(page: Path, modules: set[str]) -> Iterator[tuple[str, str]]:
    """Yield ``(module, name)`` for each ``module.name`` on a page whose module is one of ``modules``."""
    for module, name in _NAME.findall(page.read_text(encoding="utf-8")):
        if module in modules and name not in {"py", "json", "md"}:
            yield module, name


def defined(source: Path) -> set[str]:
    """Return what a source file defines at its top level, and ``Class.member`` of its classes."""
    found: set[str] = set()
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        found |= _bound(node)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{name}" for member in node.body for name in _bound(member)}
    return found


def _bound(node: ast.stmt) -> set[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, ast.AnnAssign):
        return {node.target.id} if isinstance(node.target, ast.Name) else set()
    if isinstance(node, ast.Assign):
        return {target.id for target in node.targets if isinstance(target, ast.Name)}
    return set()
