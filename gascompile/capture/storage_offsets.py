"""Storage offsets: where a tensor begins in its storage differs from call to call, and in arenas."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gascompile.core.errors import UnsupportedOpError
from gascompile.passes.graph.bound_aliases import bound_aliases


def check_offsets(graph: torch.fx.Graph, names: Mapping[str, str]) -> None:
    """Return if no view is taken at a place in the storage of one of the placeholders in ``names``.

    Raises:
        UnsupportedOpError: one is; names the op and what ``names`` calls the tensor.
    """
    owners = bound_aliases(graph, names)
    for node in graph.nodes:
        if str(node.target).startswith("aten.as_strided") and owners[node.args[0]]:
            offset = node.kwargs.get(
                "storage_offset", (*node.args, None, None)[3 + _after_source(node)]
            )
            if offset is not None:
                raise UnsupportedOpError(
                    f"op '{node.name}' takes a view of '{min(owners[node.args[0]])}' at a place in its storage, and "
                    "where a tensor begins there is another matter in each call; leave storage_offset= out, or take "
                    "a slice first"
                )


def _after_source(node: torch.fx.Node) -> int:
    return int("scatter" in str(node.target))
