"""One version of a model that runs in stubs: validates, schedules and counts requests."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence

from host.cache.responses import CacheHit
from host.config.schema import ModelConfig
from host.crashes.quarantine import Quarantine
from host.crashes.records import CrashRecord
from host.environments.environment import Environment
from host.errors import HostError, unavailable
from host.inference.call import Batch, Call, FailureReason
from host.inference.request import ExecutionTimes, InferRequest
from host.inference.validation import Signature
from host.instances.pool import PreparedModel
from host.instances.supervisor import InstanceState, Supervisor
from host.metrics.latency import MetricsSettings
from host.metrics.model_metrics import ModelMetrics
from host.metrics.statistics import CountedBatch, InferenceCounters
from host.models.draining import DrainableModel
from host.models.registry import Extensions
from host.scheduling.direct import DirectScheduler
from host.scheduling.dynamic import DynamicScheduler, hold_from_environment
from host.scheduling.ordering import OrderedCall
from host.scheduling.queue import read_queue_policies
from host.scheduling.scheduler import Scheduler
from host.scheduling.sequence_call import START, PaddingCall, SequenceCall, SequenceStates
from host.scheduling.sequence_scheduler import sequence_scheduler
from host.system.resources import usable_cpus


class PythonModel(DrainableModel):
    """Ready once its instances have joined; the loader makes it."""

    def __init__(
        self,
        config: ModelConfig,
        version: int,
        metrics: MetricsSettings | None = None,
        labels: Mapping[str, Sequence[str]] | None = None,
        states: SequenceStates | None = None,
    ) -> None:
        super().__init__()
        self.name: str = config.name
        self.version = version
        self.config = config
        self.labels = labels or {}
        self.extensions: Extensions = {}
        self.supervisors: list[Supervisor] = []
        self._retiring: dict[Supervisor, asyncio.Task[None]] = {}
        self.environment: Environment | None = None  # of its stubs; released at the end
        self.prepared: PreparedModel | None = None  # its stubs are forks of this
        self.signature = Signature(config)
        # Requests of a shape that this has accepted are valid. Another object while the quarantine
        # refuses a request, so that it costs nothing otherwise.
        self._trusted: object = self.signature
        self.scheduler = make_scheduler(config, self.signature, states)
        self.scheduler.may_recover = self._can_recover
        self._new_call = call_type(config)
        self.counters = InferenceCounters(self.name, str(version))
        self.metrics = ModelMetrics(
            config,
            version,
            self.counters,
            lambda: self.scheduler.queued,
            metrics or MetricsSettings(),
        )
        self.observes_responses = self.metrics.latencies is not None
        self._awaits_sequences = False  # as well as calls, in `drain`
        self._late: dict[Call, ExecutionTimes] = {}  # calls whose batch ended before they did

    def infer(self, request: InferRequest) -> Call:
        """Starts a request. Raises HostError if it is invalid, or if no instance can run it."""
        shape = request.shape
        if shape is not None and shape.accepted_by is self._trusted:
            request.batch_size = shape.batch_size
        else:
            self._validate_request(request)
        if not self.scheduler.instances or self._drained is not None:
            self._raise_if_unrecoverable(request)
        if self.cache is not None or request.trace is not None:
            self._copy_inspected_inputs(request)
        now = time.monotonic_ns()
        call = self._new_call(request, now, now)
        if request.trace is None:
            call.listener = self
            self._calls.add(call)
        else:
            self._track_call(call)
        if self.cache is not None:
            self.scheduler.reserve(call)
            self.cache.serve(call, self._submit)
            return call
        try:
            self.scheduler.submit(call)
        except HostError:
            self._calls.discard(call)  # it was never in progress, and is not counted
            if request.trace is not None:
                request.trace.reject_inference()
            raise
        return call

    def repeat_cache_hit(self, hit: CacheHit) -> bool:
        """As described by DrainableModel; `infer` also keeps an order, and refuses requests."""
        return (
            bool(self.scheduler.instances)
            and self._new_call is Call
            and (self.quarantine is None or not self.quarantine.active)
            and super().repeat_cache_hit(hit)
        )

    def new_call(self, request: InferRequest) -> Call:
        """Makes a call that is counted, and that `drain` waits for."""
        call = self._new_call(request)
        self._track_call(call)
        return call

    def _submit(self, call: Call) -> None:
        """Queues a call that the cache could not answer; raises if no instance is left by now."""
        try:
            if not self.scheduler.instances:
                self._raise_if_unhealthy()
            self.scheduler.submit(call)
        except HostError as error:
            self.scheduler.refuse(call, error)

    def set_quarantine(self, seconds: float) -> None:
        """Refuses a request for `seconds` after it has killed two stubs."""
        self.quarantine = Quarantine(self.name, self.version, seconds)
        self.quarantine.on_change = self._on_quarantine_changed
        self.metrics.has_quarantine = True

    def record_lethal_request(self, request: InferRequest, record: CrashRecord) -> None:
        """Records that a stub died of a request."""
        if self.quarantine is not None:
            self.quarantine.record_death(request, record)

    def _on_quarantine_changed(self) -> None:
        active = self.quarantine is not None and self.quarantine.active
        self._trusted = self.quarantine if active else self.signature

    def _validate_request(self, request: InferRequest) -> None:
        self.signature.validate_request(request)
        if self._trusted is self.signature or self.quarantine is None:
            return
        refusal = self.quarantine.find_refusal(request)
        if refusal is not None:
            self.counters.quarantined += 1
            raise refusal

    async def drain(self, sequences: bool = False) -> None:
        """As described by DrainableModel."""
        self._awaits_sequences = sequences
        self.scheduler.on_sequences_ended = self._signal_if_drained
        await super().drain()

    def _is_awaited(self) -> bool:
        return super()._is_awaited() or (self._awaits_sequences and self.scheduler.has_sequences)

    @property
    def unfinished(self) -> int:
        """Number of calls in progress; with sequences, the number of open sequences."""
        return self.scheduler.count_unfinished(self._calls)

    @property
    def in_use(self) -> bool:
        """Whether calls are in progress, sequences are open, or ensembles hold the version."""
        return super().in_use or self.scheduler.has_sequences

    @property
    def ready(self) -> bool:
        """Whether at least one instance is alive."""
        for supervisor in self.supervisors:
            if supervisor.state is InstanceState.SERVING and not supervisor.passive:
                return True
        return False

    @property
    def defines_is_ready(self) -> bool:
        """Whether the model defines `is_ready`; all instances run the same code."""
        if not self.supervisors:
            return False
        return self.supervisors[0].instance.readiness_check.model_defines_is_ready

    async def why_not_ready(self) -> str:
        """The reason why the model is not ready, "" if it is.

        Source: docs/reference/model-methods.md, "is_ready".
        """
        serving = [
            supervisor
            for supervisor in self.supervisors
            if supervisor.state is InstanceState.SERVING and not supervisor.passive
        ]
        if not serving:
            return "; ".join(supervisor.reason for supervisor in self.supervisors)
        for supervisor in serving:
            if supervisor.instance.readiness_check.model_defines_is_ready:
                reason = await supervisor.instance.readiness_check.check()
                if reason:
                    return reason
        return ""

    def queued_since(self) -> list[int]:
        """When each request that no instance has started arrived: CLOCK_MONOTONIC nanoseconds."""
        return [call.queued_ns for call in self._calls if self._is_queued(call)]

    def record_batches(self, batches: Sequence[Batch]) -> None:
        """Counts batches that have ended; those without times had not started."""
        split = self.scheduler.keeps_sequences
        counted: list[CountedBatch] = []
        for batch in batches:
            if batch.times is None:
                continue
            if split or batch.deferred:
                counted.append(self._split_batch(batch, batch.times))
            else:
                counted.append((batch.calls, batch.times, 0))
        self.counters.record_batches(counted)

    def _split_batch(self, batch: Batch, times: ExecutionTimes) -> CountedBatch:
        """Counts answered calls; of late ones, and of rows without a request, only their size."""
        late = [batch.calls[index] for index in batch.deferred]
        done = [
            call for call in batch.calls if call not in late and not isinstance(call, PaddingCall)
        ]
        others = sum(call.request.batch_size for call in batch.calls if call not in done)
        self._late.update((call, times) for call in late if not call.finished)
        return done, times, others

    def abort(self, error: HostError) -> None:
        """Ends every call in progress; `drain` and `stop` wait for nothing without callers."""
        self._awaits_sequences = False
        super().abort(error)
        self._signal_if_drained()
        for supervisor in (*self.supervisors, *self._retiring):
            supervisor.skip_grace_period()

    async def stop(self, grace: float, finalize: float) -> None:
        """Stops every instance; `grace` and `finalize` in seconds, as for `Instance.stop`."""
        self.scheduler.fail_queued(unavailable(f"model '{self.name}' is being unloaded"))
        for task in self._retiring.values():
            task.cancel()
        supervisors = [*self.supervisors, *self._retiring]
        await asyncio.gather(*(supervisor.stop(grace, finalize) for supervisor in supervisors))
        if self.quarantine is not None:
            self.quarantine.lift()
        if self.prepared is not None:
            await self.prepared.close()
        if self.environment is not None:
            self.environment.release()
        self.metrics.merge_into_successor()

    def retire_slot(self, supervisor: Supervisor, finalize: float) -> asyncio.Task[None] | None:
        """Stops an instance that is no longer needed, once it has finished its work.

        It keeps its sequences until they end; new ones go to other instances. Returns the task
        that stops it, unless it has sequences.
        """
        self.supervisors.remove(supervisor)
        empty = asyncio.Event()
        if supervisor.passive:
            empty.set()
        else:
            self.scheduler.retire_instance(supervisor, empty.set)
        task = asyncio.get_running_loop().create_task(self._stop_slot(supervisor, empty, finalize))
        self._retiring[supervisor] = task
        task.add_done_callback(lambda _: self._retiring.pop(supervisor, None))
        return task if empty.is_set() else None

    async def _stop_slot(
        self, supervisor: Supervisor, empty: asyncio.Event, finalize: float
    ) -> None:
        await empty.wait()
        await supervisor.stop(math.inf, finalize)

    def call_finished(self, call: Call) -> None:
        """Counts a call that has ended."""
        times = self._late.pop(call, None) if self._late else None
        if call.failed:
            self.counters.record_failure(
                time.monotonic_ns() - call.received_ns, self._failure_reason(call)
            )
        elif times is not None:
            self.counters.record_late_success(call, times)
        self._calls.discard(call)
        if self._drained is not None:
            self._signal_if_drained()

    def _failure_reason(self, call: Call) -> FailureReason:
        if call.failure_reason is not None:
            return call.failure_reason
        return FailureReason.OTHER if self._is_queued(call) else FailureReason.BACKEND

    def _is_queued(self, call: Call) -> bool:
        holder: object = call.holder
        return holder is self.scheduler

    def _can_recover(self) -> bool:
        for supervisor in self.supervisors:
            state = supervisor.state
            if state is InstanceState.RESTARTING or state is InstanceState.BACKING_OFF:
                return True
        return False

    def _raise_if_unrecoverable(self, request: InferRequest) -> None:
        """Raises HostError unless an instance is alive or is being replaced."""
        if self._drained is not None and self.scheduler.keeps_sequences:
            if request.flags & START or not request.correlation_id:
                raise unavailable(
                    "Server is stopping, scheduler for model has stopped accepting new inference"
                    " requests"
                )
        else:
            self._raise_if_draining(request)
        if not self.scheduler.instances:
            self._raise_if_unhealthy()

    def _raise_if_unhealthy(self) -> None:
        if not any(supervisor.state is InstanceState.RESTARTING for supervisor in self.supervisors):
            raise unavailable("; ".join(supervisor.reason for supervisor in self.supervisors))


def call_type(config: ModelConfig) -> type[Call]:
    """The type of the model's calls, which depends on its scheduler."""
    if config.HasField("sequence_batching"):
        return SequenceCall
    return OrderedCall if config.dynamic_batching.preserve_ordering else Call


def make_scheduler(
    config: ModelConfig, signature: Signature, states: SequenceStates | None = None
) -> Scheduler:
    """Makes the scheduler that the configuration asks for. Raises HostError."""
    if config.HasField("sequence_batching"):
        return sequence_scheduler(config, signature.can_share_batch, states)
    if config.WhichOneof("scheduling_choice") != "dynamic_batching":
        return DirectScheduler(cpus=usable_cpus())
    batching = config.dynamic_batching
    return DynamicScheduler(
        config.max_batch_size,
        batching.max_queue_delay_microseconds / 1e6,
        signature.can_share_batch,
        preferred=batching.preferred_batch_size,
        policies=read_queue_policies(batching),
        keep_order=batching.preserve_ordering,
        hold=hold_from_environment(),
    )
