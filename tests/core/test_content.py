"""Content of tensors: all bytes, in order, and nothing that changes what they lie in."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gascompile
from gascompile.core.content import content_of


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(24.0).reshape(2, 3, 4),
        torch.arange(24).reshape(4, 6).t()[1:, ::2],
        torch.tensor(3.5, dtype=torch.float64),
        torch.zeros(0, 3),
        torch.tensor([True, False]),
        torch.ones(3, 1).expand(3, 5),
        torch.tensor([1 + 2j, 3 - 4j]).conj(),
        torch.arange(7.0, dtype=torch.bfloat16)[6:],
    ],
    ids=str,
)
def test_bytes_are_those_of_the_elements(value: torch.Tensor) -> None:
    expected = value.resolve_conj().clone(memory_format=torch.contiguous_format).reshape(-1)
    found = content_of(value)
    assert len(found) == value.numel() * value.element_size()
    assert bytes(found) == expected.view(torch.uint8).numpy().tobytes()


def test_memory_stays_as_long_as_it_is_read() -> None:
    found = content_of(torch.arange(1000.0) + 1)
    others = [torch.zeros(1000) for _ in range(50)]
    assert bytes(found) == torch.arange(1.0, 1001.0).numpy().tobytes()
    del others


def test_compiling_leaves_storages_that_can_be_resized() -> None:
    constant = torch.ones(8)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.register_buffer("count", torch.zeros(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.get_buffer("count").add_(1)
            found: torch.Tensor = self.layer(x) + self.get_buffer("count") + constant
            return found

    model = Model().eval()
    with gascompile.compile(model, "1MiB") as compiled:
        compiled(torch.ones(2, 8))
    tensors = [constant, *model.parameters(), *model.buffers()]
    assert all(tensor.untyped_storage().resizable() for tensor in tensors)
