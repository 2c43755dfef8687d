"""Names that a model takes by ``**``: given a place of their own while it is exported.

``torch.export`` keeps such arguments in a dictionary of its own in one place and beside the others in another, so that
no dimension of any argument can be dynamic where there are some.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_SIGNATURE = "__signature__"


@contextmanager
def named_keywords(model: nn.Module, names: Iterable[str]) -> Iterator[None]:
    """Have the signature of ``model.forward`` name all of ``names`` meanwhile."""
    bound: Any = model.forward
    function = getattr(bound, "__func__", bound)
    signature = inspect.signature(function)
    known = signature.parameters
    others = [name for name in names if name not in known]
    if not others or all(p.kind is not p.VAR_KEYWORD for p in known.values()):
        yield
        return
    kept = [p for p in known.values() if p.kind is not p.VAR_KEYWORD]
    added = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in others]
    before = vars(function).get(_SIGNATURE)
    function.__signature__ = signature.replace(parameters=[*kept, *added])
    try:
        yield
    finally:
        if before is None:
            del function.__signature__
        else:
            function.__signature__ = before
