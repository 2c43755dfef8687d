"""A budget that several compiled models share: of all of them one at a time holds memory."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from gascompile.core.waiting import Turn

if TYPE_CHECKING:
    from gascompile.api.runner import Runner


class SharedBudget:
    """Runners that take turns with one budget, also where several threads call them."""

    def __init__(self) -> None:
        self.turn = Turn()
        self._runners: weakref.WeakSet[Runner] = weakref.WeakSet()

    def add(self, runner: Runner) -> None:
        """Have ``runner``, which holds no memory yet, take part."""
        runner.share(self)
        self._runners.add(runner)

    def give_way(self, runner: Runner) -> None:
        """Free what all others hold; who calls has the turn."""
        for other in list(self._runners):
            if other is not runner:
                other.close()
