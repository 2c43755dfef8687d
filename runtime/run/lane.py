"""The second stream of a run: ops on the host's processor while the device computes, by a thread of their own.

It goes through its own steps in their order and meets the device at the copies between them alone. No signal
reaches it; whatever ends the run, on either side, ends both.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from gascompile.core.waiting import Gate, OwnThread
from gascompile.runtime.run.meter import LiveBytes
from gascompile.runtime.transfer.crossings import AbortedError, Crossings

if TYPE_CHECKING:
    from gascompile.runtime.run.schedule import RunSchedule


class Lane:
    """One run of the steps of one site."""

    def __init__(
        self,
        schedule: RunSchedule,
        values: list[Any],
        inputs: tuple[Any, ...],
        crossings: Crossings,
        serve: Callable[[int], object] = bool,
    ) -> None:
        """Put the inputs on the host for it; nothing runs before ``start``.

        Args:
            schedule: of the run.
            values: its slots; results of this site go to slots that nobody else touches.
            inputs: what the user passed in.
            crossings: where it meets the device.
            serve: lets the memory of a thread's large values be kept for its next ones, or no more.
        """
        self._serve = serve
        self.site, self._steps = schedule.site, schedule.elsewhere
        self._values, self._crossings = values, crossings
        for name, slot in schedule.host_lasting:
            values[slot] = crossings.at_home(name)
        for number, slot in schedule.host_inputs:
            given = inputs[number]
            values[slot] = given.cpu() if isinstance(given, torch.Tensor) else given
        self.live = LiveBytes()
        self.busy_s = 0.0
        """Seconds in ops."""
        self.op = 0
        """The op at hand."""
        self.error: BaseException | None = None
        self._is_cancelled = False
        self._go = Gate()
        self._thread: OwnThread | None = None

    def beside(
        self,
        device: Callable[[], None],
        lanes: list[Lane],
        explained: Callable[[BaseException, int, list[Any]], BaseException],
    ) -> None:
        """Run beside the steps of the device, and return when both have ended.

        Args:
            device: goes through the device's steps.
            lanes: of the session, which ends those that are in it with a run that fails.
            explained: makes of an error of an op what is raised.
        """
        # Before it starts: whoever ends this run, an interrupt included, ends that, too.
        lanes.append(self)
        try:
            self.start()
            device()
            self.join()
        except AbortedError:
            self.join()
            if self.error is None:
                raise
        if self.error is not None:
            raise explained(self.error, self.op, [])
        lanes.remove(self)
        self._crossings.end()

    def start(self) -> None:
        """Begin."""
        self._thread = OwnThread(self._work, f"gascompile-site-{self.site}")
        # Only one that can be joined does anything: an interrupt may come before it is known.
        self._open()

    def cancel(self) -> None:
        """Let it end after the op at hand, without waiting for that."""
        self._is_cancelled = True
        self._open()
        self._crossings.abort()

    def join(self) -> None:
        """Block until it has ended."""
        if self._thread is not None:
            self._thread.join()

    def _open(self) -> None:
        try:
            if not self._go.is_open:
                self._go.open()
        except RuntimeError:
            pass  # it was just opened

    def _work(self) -> None:
        self._go.wait()
        try:
            # Asked for the number, a new thread takes on what ``set_num_threads`` said; unasked, OpenMP, MKL and oneDNN
            # give it as many as there are processors, beside those of the other side.
            torch.get_num_threads()
            self._serve(1)
            # Of this thread alone. Nothing here is differentiated, and slots may be tensors of this kind.
            with torch.inference_mode():
                self._walk(self._values)
        except AbortedError:
            self._crossings.abort()
        except BaseException as error:  # noqa: BLE001 - raised by the thread that the run is of
            # The other side finds it when it waits for this one.
            self.error = error
            self._crossings.abort()
        finally:
            self._values = []

    def _walk(self, values: list[Any]) -> None:
        record: Callable[..., None] = self.live.record
        for function, gather, result, meter, frees, op, trait, *_ in self._steps:
            if self._is_cancelled:
                return
            self.op = op
            begun_s = time.perf_counter()
            values[result] = function(*gather(values))
            if trait.num_ops:
                self.busy_s += time.perf_counter() - begun_s
            if meter is not None:
                record(meter, values[result])
            for slot in frees:
                values[slot] = None
