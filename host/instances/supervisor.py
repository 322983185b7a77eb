"""Supervises one instance of a model, and replaces its stub when it dies."""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial

from host.crashes.records import CrashRecord
from host.errors import HostError, unavailable
from host.inference.call import Batch, Call, CallHolder
from host.inference.request import ExecutionTimes, InferRequest
from host.instances.instance import Instance
from host.instances.stub_process import RestartBackoff, StubLost
from host.scheduling.rate_limiter import Permit
from host.scheduling.scheduler import InstanceSlot, Scheduler

_log = logging.getLogger("pbhost")

_FIRST_BACK_OFF, _MAX_BACK_OFF = 0.5, 30.0  # seconds before the second restart, and at most
_MAX_RESTARTS = 10  # in a row, without a batch that ended well
_PROVEN_SECONDS = 600.0  # of service, after which earlier deaths no longer count
_PREFETCH_NS, _MAX_PREFETCH = 4_000_000, 64  # work that a stub may prefetch, and calls at most
_SHORT_NS = _PREFETCH_NS // _MAX_PREFETCH  # of a batch, so that a stub may prefetch so many calls


class InstanceState(enum.Enum):
    """The states of a supervised instance."""

    SERVING = "serving"
    RESTARTING = "restarting"
    BACKING_OFF = "pausing before a restart"
    FAILED = "failed"
    STOPPED = "stopped"


_SERVING = InstanceState.SERVING


_UNKNOWN_NS = 1e6  # taken for the duration of executions before the first one
_WEIGHT = 1 / 8  # of the last execution in the mean
_FAST_NS = 100_000  # a mean execution that takes less than the wake-up of another stub does
_OVERHEAD_NS = 25_000  # of a stub for a small request, besides `execute`
_MAX_WAIT_NS = 250_000  # of prefetched calls behind each other while another instance is idle


def reclaimable_limit(mean_ns: float, finds_core: bool) -> int:
    """Number of calls that a stub may prefetch if the model has other instances.

    `mean_ns`: of an execution. `finds_core`: whether an idle instance would find a core to run on.
    A slow instance gets none (docs/explanation/decisions/0038).
    """
    if mean_ns >= _FAST_NS:
        return 0
    wait_ns = _MAX_WAIT_NS if finds_core else _PREFETCH_NS
    return min(_MAX_PREFETCH, int(wait_ns / (mean_ns + _OVERHEAD_NS)))


def prefetch_limit(batch_ns: int) -> int:
    """Number of calls that a stub may prefetch if its last batch took `batch_ns`.

    An instance that joins later cannot take them over, so they must be done soon
    (docs/explanation/decisions/0017).
    """
    return max(1, min(_MAX_PREFETCH, _PREFETCH_NS // max(1, batch_ns)))


class Supervisor(InstanceSlot):
    """Keeps one instance alive.

    A stub that dies is replaced: at once the first time, then after growing pauses; so is a
    replacement that a signal kills. A stub that fails to initialise is not tried again, as the same
    code would fail again. A `passive` instance takes no work. With a `permit`, each batch needs it.
    `launch` starts a stub that is ready to run batches, and raises HostError or StubLost.
    `on_lethal_request`: as in `CrashReporter`.
    """

    def __init__(
        self,
        instance: Instance,
        launch: Callable[[], Awaitable[Instance]],
        scheduler: Scheduler,
        report: Callable[[Sequence[Batch]], None],
        passive: bool = False,
        permit: Permit | None = None,
        on_lethal_request: Callable[[InferRequest, CrashRecord], None] = lambda *crash: None,
    ) -> None:
        self.instance = instance
        self.permit = permit
        if permit is not None:
            permit.owner = self
        self.passive = passive
        self.state = InstanceState.SERVING
        self.reason = ""
        self.restarts = 0
        self.busy_ns = 0  # of batches that have ended; they may overlap
        self._launch = launch
        self._scheduler = scheduler
        self._report = report
        self._mean_ns = _UNKNOWN_NS  # of recent executions
        self._returns_calls = False  # whether it has returned one, as its model waited for another
        self._prefetch_limit = 1  # number of calls that the stub may prefetch
        self._backoff = RestartBackoff(_FIRST_BACK_OFF, _MAX_BACK_OFF, _PROVEN_SECONDS)
        self._restart: asyncio.Task[None] | None = None
        self._calls_awaiting_permit: Sequence[Call] = ()  # the batch that waits for its permit
        self._on_lethal_request = on_lethal_request
        self._watch(instance)

    def _watch(self, instance: Instance) -> None:
        instance.on_unexpected_exit = self._on_exit
        instance.crash_reporter.on_lethal_request = self._on_lethal_request

    def start_accepting(self) -> None:
        """Takes work from the scheduler from now on."""
        if self.instance.serving:
            if not self.passive:
                self._scheduler.instance_ready(self)
        else:  # it died before its callbacks were set
            self._on_exit(self.instance.exit_reason)

    # Instance

    def run(self, calls: Sequence[Call]) -> None:
        """Runs a batch, once its permit is granted."""
        permit = self.permit
        if permit is None:
            self.instance.session.run_batch(
                Batch(calls, self._on_released, self._on_batch_done, self._report)
            )
            return
        self._calls_awaiting_permit = calls
        if permit.granted or permit.request_execution(self._run_permitted):
            self._run_permitted()

    def _run_permitted(self) -> None:
        """Runs what is left of the batch that waited for its permit."""
        assert self.permit is not None
        calls = [call for call in self._calls_awaiting_permit if not call.finished]
        self._calls_awaiting_permit = ()
        if calls:
            self.permit.start_execution()
            self.instance.session.run_batch(
                Batch(calls, self._on_released, self._on_batch_done, self._report)
            )
        else:
            self.permit.release_unused()
            self._on_released()

    def _fail_waiting(self, error: HostError) -> None:
        """Fails the batch that waits for its permit."""
        calls, self._calls_awaiting_permit = self._calls_awaiting_permit, ()
        for call in calls:
            call.fail(error)
        if self.permit is not None:
            self.permit.release_unused()

    def cancel_call(self, call: Call) -> bool:
        """Cancels a call that runs here; returns whether its model has it."""
        return self.instance.session.cancel_call(call)

    def accepts_prefetch(self, call: Call, prefetched: int) -> bool:
        """Whether the stub may have this call while it runs another one and has more.

        It gets more than one only if they take little time, so that an instance that joins still
        finds work. Tensors that need shared memory wait here, as that is for calls that run.
        """
        return (
            prefetched < self._prefetch_limit
            and self.permit is None
            and self.instance.session.accepts_prefetch(call)
        )

    def accepts_reclaimable(self, call: Call, prefetched: int, finds_core: bool) -> bool:
        """Whether the stub may prefetch this call although the model has other instances."""
        return (
            self._mean_ns < _FAST_NS
            and prefetched < reclaimable_limit(self._mean_ns, finds_core)
            and self.permit is None
            and self._accepts_reclaimable(call)
        )

    def accepts_next(self, call: Call) -> bool:
        """Whether the stub may prefetch this call as its next one, as all instances are busy.

        For fast instances there is `accepts_reclaimable`. A model that waits for others would
        return the call.
        """
        return (
            _FAST_NS <= self._mean_ns < _PREFETCH_NS
            and not self._returns_calls
            and self.permit is None
            and self._accepts_reclaimable(call)
        )

    def _accepts_reclaimable(self, call: Call) -> bool:
        """Whether the stub lives, and the call can be taken back from it."""
        instance = self.instance
        return instance.serving and instance.session.accepts_reclaimable(call)

    def run_prefetched(
        self, call: Call, on_returned: Callable[[InstanceSlot, Call], None] | None
    ) -> None:
        """Sends a call to the stub, which starts it when it has ended what it runs."""
        self.instance.session.run_batch(
            Batch(
                [call],
                self._on_released,
                self._on_batch_done,
                self._report,
                on_returned and partial(self._on_returned, on_returned),
            )
        )

    def _on_returned(self, pass_on: Callable[[InstanceSlot, Call], None], call: Call) -> None:
        self._returns_calls = True
        pass_on(self, call)

    def reclaim_prefetched(self, most: int) -> Sequence[Call]:
        """Takes back at most `most` calls that the stub has not taken."""
        return self.instance.session.reclaim_prefetched(most)

    def drain_prefetched(self) -> Sequence[Call]:
        """Returns, once, the prefetched calls that the stub had not started when it died."""
        return self.instance.session.drain_prefetched()

    def report_expired_sequences(self, correlation_ids: Sequence[int | str]) -> None:
        """Tells the model that sequences have ended without an END."""
        self.instance.report_expired_sequences(correlation_ids)

    @property
    def blocking_calls(self) -> Sequence[Call]:
        """The BLS calls that the running batch waits for."""
        return tuple(self.instance.session.bls_requests.blocking_calls.values())

    @property
    def awaited_models(self) -> Collection[str]:
        """The models that BLS requests of the instance wait for."""
        return self.instance.session.bls_requests.awaited_models

    @property
    def resource_holders(self) -> Sequence[CallHolder]:
        """The instances that hold the resources that this one needs."""
        if self.permit is None or self.permit.active:
            return ()
        return self.permit.holders

    def overtake(self) -> bool:
        """Takes resources that are free and for which others wait."""
        return self.permit is not None and self.permit.overtake()

    @property
    def potentially_blocking_calls(self) -> Sequence[Sequence[Call]]:
        """For each batch in progress, the BLS calls that it made."""
        instance = self.instance
        return [
            instance.session.bls_requests.calls_of_batch(number)
            for number in instance.session.blocking_batches
        ]

    def _on_released(self) -> None:
        if self.state is InstanceState.SERVING:
            self._scheduler.instance_ready(self)

    def _on_batch_done(self, batch: Batch, times: ExecutionTimes | None, released: bool) -> None:
        if times is not None:
            self._backoff.exits = 0
            batch_ns = times.ended - times.started
            self.busy_ns += batch_ns
            self._prefetch_limit = (
                _MAX_PREFETCH if batch_ns <= _SHORT_NS else prefetch_limit(batch_ns)
            )
            self._mean_ns += (batch_ns - self._mean_ns) * _WEIGHT
        if released and self.state is _SERVING:
            self._scheduler.instance_ready(self)
        if self.permit is not None:
            # After the instance has requested its next execution, which may have a lower rank than
            # the others that wait.
            self.permit.finish_execution()

    # Restarts

    def _on_exit(self, reason: str) -> None:
        self._backoff.process_exited()
        self.reason = reason
        self._fail_waiting(unavailable(reason))
        self._scheduler.instance_removed(self)
        self._log_exit()
        self.state = InstanceState.RESTARTING
        self._restart = asyncio.get_running_loop().create_task(self._restart_until_serving())

    async def _restart_until_serving(self) -> None:
        """Starts another stub, and again if it dies meanwhile."""
        while self._backoff.exits <= _MAX_RESTARTS:
            await self._back_off()
            try:
                instance = await self._launch()
            except StubLost as error:
                self._backoff.exits += 1
                self.reason = error.message.rstrip(".")
                self._log_exit()
            except HostError as error:
                name = self.instance.name
                self._mark_failed(
                    f"Instance '{name}' died and could not be restarted: {error.message}"
                )
                return
            else:
                self._resume(instance)
                return
        self._mark_failed(f"{self.reason}, {self._backoff.exits} times in a row")

    async def _back_off(self) -> None:
        """Waits after the second death in a row."""
        delay = self._backoff.pause
        if not delay:
            return
        self.state = InstanceState.BACKING_OFF
        self.reason += f"; the next one starts in {delay:g} s"
        self._fail_queued_if_last(self.reason)
        await asyncio.sleep(delay)
        self.state = InstanceState.RESTARTING

    def _resume(self, instance: Instance) -> None:
        self.instance = instance
        self._watch(instance)
        self.state = InstanceState.SERVING
        self._backoff.process_started()
        self.restarts += 1
        _log.info("restarted", extra={"instance": instance.label})
        self.start_accepting()

    def _log_exit(self) -> None:
        label = self.instance.label
        _log.error("%s; starting a new one", self.reason, extra={"instance": label})

    def _mark_failed(self, reason: str) -> None:
        self.state = InstanceState.FAILED
        self.reason = reason
        _log.error("not started again: %s", reason, extra={"instance": self.instance.label})
        self._fail_queued_if_last(reason)

    def _fail_queued_if_last(self, reason: str) -> None:
        """Fails queued calls if there is no other instance to run them soon."""
        if not self._scheduler.instances:
            self._scheduler.fail_queued(unavailable(reason))

    @property
    def idle(self) -> bool:
        """Whether it has no batch."""
        return self.instance.session.idle and not self._calls_awaiting_permit

    def skip_grace_period(self) -> None:
        """Ends the wait of `stop` for running work, also if it is in progress."""
        self.instance.session.skip_wait_idle()

    async def stop(self, grace: float, finalize: float) -> None:
        """Stops the instance; `grace` and `finalize` in seconds, as for `Instance.stop`."""
        self.state = InstanceState.STOPPED
        self._scheduler.instance_removed(self)
        self._fail_waiting(unavailable(f"instance '{self.instance.name}' is being unloaded"))
        if self._restart is not None and not self._restart.done():
            self._restart.cancel()
            await asyncio.wait([self._restart])
        await self.instance.stop(grace, finalize)
        if self.permit is not None:
            self.permit.close()
