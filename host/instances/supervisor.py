"""One lane of a model: an instance that is replaced when it dies."""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Awaitable, Callable, Sequence

from host.errors import HostError, unavailable
from host.inference.request import Call, Times
from host.instances.batch import Batch
from host.instances.instance import Instance
from host.instances.process import StubLost
from host.scheduling.rate_limiter import Permit
from host.scheduling.scheduler import Scheduler

_log = logging.getLogger("pbhost")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0  # seconds before the second restart in a row, and any
_MOST_RESTARTS = 10  # in a row, without one batch that ended well
_AHEAD_NS, _MOST_AHEAD = 4_000_000, 64  # of work that a stub is sent ahead, and calls at most


class LaneState(enum.Enum):
    """The life of a lane."""

    SERVING = "serving"
    RESTARTING = "restarting"
    PAUSING = "pausing before a restart"
    FAILED = "failed"
    STOPPED = "stopped"


Launch = Callable[[], Awaitable[Instance]]
"""Brings up a new instance for the lane, ready to run batches. Raises HostError or StubLost."""

BatchReport = Callable[[Batch, Times], None]


def most_ahead(spent: int) -> int:
    """Calls that a stub is sent before it can begin them, if its last one took so many ns.

    A lane that joins later cannot have them any more, so they are to be done soon (decision 17).
    """
    return max(1, min(_MOST_AHEAD, _AHEAD_NS // max(1, spent)))


class Supervisor:
    """Keeps one lane of a scheduler alive.

    A stub that dies is replaced: at once the first time, then with growing pauses; so is one that a
    signal ends while it replaces another. One that fails to initialise is not tried again: what
    failed once with this code fails again. A `passive` one takes no work. With a `permit`, each
    batch needs it.
    """

    def __init__(
        self,
        instance: Instance,
        launch: Launch,
        scheduler: Scheduler,
        report: BatchReport,
        passive: bool = False,
        permit: Permit | None = None,
    ) -> None:
        self.instance = instance
        self.permit = permit
        if permit is not None:
            permit.owner = self
        self.passive = passive
        self.state = LaneState.SERVING
        self.reason = ""
        self.restarts = 0
        self.busy_ns = 0  # of batches that have ended; they may overlap
        self._launch = launch
        self._scheduler = scheduler
        self._report = report
        self._most_ahead = 1  # calls that the stub is sent before it can begin them
        self._deaths = 0
        self._restart: asyncio.Task[None] | None = None
        self._waiting: Sequence[Call] = ()  # the batch that has no permission as yet
        instance.on_death = self._died

    def join(self) -> None:
        """Take work from the scheduler from now on."""
        if self.instance.serving:
            if not self.passive:
                self._scheduler.lane_free(self)
        else:  # it died before anybody could be told
            self._died(self.instance.death)

    # Lane

    def run(self, calls: Sequence[Call]) -> None:
        """Run a batch, as soon as there is permission."""
        permit = self.permit
        if permit is None:
            self.instance.execute(Batch(calls, self._released, self._done, self._report))
            return
        self._waiting = calls
        if permit.granted or permit.ask(self._permitted):
            self._permitted()

    def _permitted(self) -> None:
        """Run the batch that has waited for resources, or what is left of it."""
        assert self.permit is not None
        calls = [call for call in self._waiting if not call.finished]
        self._waiting = ()
        if calls:
            self.permit.start()
            self.instance.execute(Batch(calls, self._released, self._done, self._report))
        else:
            self.permit.give_back()
            self._released()

    def _fail_waiting(self, error: HostError) -> None:
        """There will be no permission for the batch that waits for it."""
        calls, self._waiting = self._waiting, ()
        for call in calls:
            call.fail(error)
        if self.permit is not None:
            self.permit.give_back()

    def cancel(self, call: Call) -> bool:
        """Nobody waits any more for a call that runs here; whether its model has it."""
        return self.instance.work.cancel(call)

    def takes_ahead(self, call: Call, ahead: int) -> bool:
        """Whether the stub gets this call while it still works on another one, and has more.

        It gets more than one only if it takes no time: a lane that joins finds work then still.
        What would have to be put into shared memory waits here: that is for what runs.
        """
        return (
            ahead < self._most_ahead
            and self.permit is None
            and self.instance.work.takes_ahead(call)
        )

    def take_unstarted(self) -> Sequence[Call]:
        """What the stub was sent and had not begun when it died; told once."""
        return self.instance.work.take_unstarted()

    @property
    def waiting_for(self) -> Sequence[Call]:
        """The BLS calls that the running batch cannot go on without."""
        return tuple(self.instance.questions.blocking.values())

    @property
    def held_up_by(self) -> Sequence[object]:
        """The lanes that hold the resources without which this one cannot run anything."""
        if self.permit is None or self.permit.active:
            return ()
        return self.permit.holders

    @property
    def may_wait_for(self) -> Sequence[Sequence[Call]]:
        """What each batch that has not ended has asked for."""
        instance = self.instance
        return [instance.questions.of(number) for number in instance.work.holding]

    def _released(self) -> None:
        if self.state is LaneState.SERVING:
            self._scheduler.lane_free(self)

    def _done(self, times: Times | None) -> None:
        if self.permit is not None:
            self.permit.end()
        if times is not None:
            self._deaths = 0
            spent = times.ended - times.started
            self.busy_ns += spent
            self._most_ahead = most_ahead(spent)

    # Life

    def _died(self, reason: str) -> None:
        self._deaths += 1
        self.reason = reason
        self._fail_waiting(unavailable(reason))
        self._scheduler.lane_gone(self)
        self._log_death()
        self.state = LaneState.RESTARTING
        self._restart = asyncio.get_running_loop().create_task(self._replace())

    async def _replace(self) -> None:
        """Bring up another stub, and again if it is lost on its way."""
        while self._deaths <= _MOST_RESTARTS:
            await self._pause()
            try:
                instance = await self._launch()
            except StubLost as error:
                self._deaths += 1
                self.reason = error.message.rstrip(".")
                self._log_death()
            except HostError as error:
                name = self.instance.name
                self._give_up(f"Instance '{name}' died and could not be restarted: {error.message}")
                return
            else:
                self._resume(instance)
                return
        self._give_up(f"{self.reason}, {self._deaths} times in a row")

    async def _pause(self) -> None:
        """After a second death in a row there is a while without a stub."""
        if self._deaths < 2:
            return
        self.state = LaneState.PAUSING
        pause = min(_FIRST_PAUSE * 2 ** (self._deaths - 2), _LONGEST_PAUSE)
        self.reason += f"; the next one starts in {pause:g} s"
        self._fail_if_alone(self.reason)
        await asyncio.sleep(pause)
        self.state = LaneState.RESTARTING

    def _resume(self, instance: Instance) -> None:
        self.instance = instance
        instance.on_death = self._died
        self.state = LaneState.SERVING
        self.restarts += 1
        _log.info("restarted", extra={"instance": instance.label})
        self.join()

    def _log_death(self) -> None:
        label = self.instance.label
        _log.error("%s; starting a new one", self.reason, extra={"instance": label})

    def _give_up(self, reason: str) -> None:
        self.state = LaneState.FAILED
        self.reason = reason
        _log.error("not started again: %s", reason, extra={"instance": self.instance.label})
        self._fail_if_alone(reason)

    def _fail_if_alone(self, reason: str) -> None:
        """With no other lane, nobody will come for the calls in the queue soon."""
        if not self._scheduler.lanes:
            self._scheduler.fail_queued(unavailable(reason))

    def hurry(self) -> None:
        """Have `stop` wait no longer for what the stub works on, also if it is under way."""
        self.instance.work.stop_waiting()

    async def stop(self, grace: float, finalize: float) -> None:
        """End the lane; seconds as for `Instance.stop`."""
        self.state = LaneState.STOPPED
        self._scheduler.lane_gone(self)
        self._fail_waiting(unavailable(f"instance '{self.instance.name}' is being unloaded"))
        if self._restart is not None and not self._restart.done():
            self._restart.cancel()
            await asyncio.wait([self._restart])
        await self.instance.stop(grace, finalize)
        if self.permit is not None:
            self.permit.close()
