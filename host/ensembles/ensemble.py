"""One version of an ensemble: loads it, validates, executes and counts its requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from host.cache.responses import ResponseCache, ResponseStore
from host.config.auto_complete import complete_config
from host.config.model_config import LoadedConfig
from host.config.parameters import preserves_ordering
from host.config.schema import ModelConfig
from host.ensembles.execution import EnsembleExecution
from host.ensembles.plan import (
    EnsemblePlan,
    EnsembleSignature,
    EnsembleStep,
    StepModel,
)
from host.ensembles.step_limits import InflightLimiter
from host.errors import HostError
from host.inference.call import Call, ComputeCallback, FailureReason
from host.inference.request import InferRequest, Tensor
from host.inference.validation import Signature
from host.instances.arenas import Arenas
from host.instances.regions import write_outputs
from host.metrics.latency import MetricsSettings
from host.metrics.model_metrics import ModelMetrics
from host.metrics.statistics import InferenceCounters
from host.models.draining import DrainableModel
from host.models.loaders import InstanceUpdate
from host.models.registry import Extensions, LoadedModel, Registry
from host.repository.model_directory import read_labels


class Ensemble(DrainableModel):
    """Looks up its step models at every request, and holds them until the request ends."""

    def __init__(
        self,
        config: ModelConfig,
        version: int,
        registry: Registry,
        place_tensor: Callable[[Tensor], None],
        metrics: MetricsSettings | None = None,
        labels: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        super().__init__()
        self.name: str = config.name
        self.version = version
        self.config = config
        self._own_labels = labels or {}
        self.extensions: Extensions = {}
        self.counters = InferenceCounters(self.name, str(version))
        self.metrics = ModelMetrics(
            config, version, self.counters, lambda: 0, metrics or MetricsSettings()
        )
        self.observes_responses = self.metrics.latencies is not None
        self._registry = registry
        self._place_tensor = place_tensor
        self._signature = Signature(config)
        self._plan = EnsemblePlan(config)
        self._ensemble_signature = EnsembleSignature(
            self.name,
            version,
            {
                output.name: list(
                    output.reshape.shape if output.HasField("reshape") else output.dims
                )
                for output in config.output
            },
            config.max_batch_size > 0,
            bool(config.model_transaction_policy.decoupled),
            preserves_ordering(config),
        )
        most = config.ensemble_scheduling.max_inflight_requests
        self._limiter = InflightLimiter(self.name, most) if most else None
        self._executions: dict[Call, tuple[EnsembleExecution, int]] = {}  # and when they started
        self._step_models: dict[int, StepModel] = {}  # as they were when a step last ran

    @property
    def labels(self) -> Mapping[str, Sequence[str]]:
        """Names of classes, by output: of its own label files, or of the models that make them."""
        inherited = {name: self._inherit_labels(name) for name in self._plan.outputs}
        return inherited | dict(self._own_labels)

    def _inherit_labels(self, output: str) -> Sequence[str]:
        source = self._plan.find_source(output)
        if source is None:
            return ()
        step, name = source
        try:
            model = self._registry.find_step_model(step.known, step.version)
        except HostError:  # the request fails with it
            return ()
        return model.labels.get(name, ())

    def infer(self, request: InferRequest) -> Call:
        """Starts a request. Raises HostError if it is invalid or if a step model is missing."""
        self._signature.validate_request(request)
        self._raise_if_draining(request)
        self._copy_inspected_inputs(request)
        call = Call(request)
        self._track_call(call)
        if self.cache is not None:
            self.cache.serve(call, self._run)
        else:
            self._run(call)
        return call

    def _run(self, call: Call) -> None:
        started = time.monotonic_ns()
        route = self._plan.route(call.request.requested_outputs)
        try:
            step_models = {step.index: self._find_step_model(step) for step in route.steps}
        except HostError as error:
            call.fail(HostError(error.code, f"in ensemble '{self.name}', {error.message}"))
            return
        models = {id(step_model.model): step_model.model for step_model in step_models.values()}
        for model in models.values():
            model.acquire()
        ended = partial(self._release_step_models, list(models.values()))
        run = EnsembleExecution(
            self._ensemble_signature,
            call,
            route,
            step_models,
            self._place_tensor,
            self._limiter,
            ended,
        )
        self._executions[call] = run, started
        run.start()

    def _find_step_model(self, step: EnsembleStep) -> StepModel:
        """The model that runs the step now. Raises HostError."""
        model = self._registry.find_step_model(step.known, step.version)
        known = self._step_models.get(step.index)
        if known is None or known.model is not model:
            config = model.config
            known = self._step_models[step.index] = StepModel(
                model,
                {entry.name: list(entry.dims) for entry in config.input},
                config.max_batch_size > 0,
                bool(config.model_transaction_policy.decoupled),
            )
        return known

    def _release_step_models(self, models: Sequence[LoadedModel], run: EnsembleExecution) -> None:
        for model in models:
            model.release()

    def call_finished(self, call: Call) -> None:
        """Counts a call that has ended."""
        execution = self._executions.pop(call, None)
        if execution is not None:
            self._record_execution(call, *execution)
        elif call.failed:  # before any step: by the cache, or cancelled
            self.counters.record_failure(time.monotonic_ns() - call.received_ns, _REASON)
        self._release_call(call)

    def _record_execution(self, call: Call, run: EnsembleExecution, started: int) -> None:
        """Counts a request; its times are the sums over its steps.

        Source: docs/reference/ensembles.md, "Execution".
        """
        now = time.monotonic_ns()
        total = now - call.received_ns
        if call.failed:
            # A request that failed in a step counts twice: for its response and for its end.
            for _ in range(2 if run.failed_inside else 1):
                self.counters.record_failure(total, _REASON)
        else:
            size = call.request.batch_size
            self.counters.record_success(size, total, started - call.queued_ns, *run.spent)
            self.counters.record_execution(size, *run.spent)
            run.on_late = self.counters.add_compute_times
        if call.on_computed is not None:  # this call is a step of another ensemble
            call.on_computed(*run.spent)
            run.on_late = partial(self._record_compute_times, call.on_computed, not call.failed)

    def _record_compute_times(
        self, tell: ComputeCallback, counted: bool, input_ns: int, infer_ns: int, output_ns: int
    ) -> None:
        """Adds the times of a step that ended after the last response."""
        if counted:
            self.counters.add_compute_times(input_ns, infer_ns, output_ns)
        tell(input_ns, infer_ns, output_ns)

    # The interface for the registry and the lifecycle

    @property
    def ready(self) -> bool:
        """Whether every step model is ready."""
        try:
            return all(self._find(step).ready for step in self._plan.steps)
        except HostError:
            return False

    @property
    def defines_is_ready(self) -> bool:
        """Whether a step model defines `is_ready`."""
        try:
            return any(self._find(step).defines_is_ready for step in self._plan.steps)
        except HostError:
            return False

    async def why_not_ready(self) -> str:
        """The reason of the first step model that is not ready, "" if all are."""
        for step in self._plan.steps:
            try:
                reason = await self._find(step).why_not_ready()
            except HostError as error:
                reason = error.message
            if reason:
                return f"its step model '{step.model}' is not ready: {reason}"
        return ""

    def _find(self, step: EnsembleStep) -> LoadedModel:
        return self._registry.find_step_model(step.known, step.version)

    async def stop(self, grace: float, finalize: float) -> None:
        """Does nothing: an ensemble has no instances of its own."""
        self._step_models.clear()
        self.metrics.merge_into_successor()


_REASON = FailureReason.OTHER
"""Step models count the precise reason with their own requests."""


class EnsembleLoader:
    """The loader of ensembles. `store`: the response cache."""

    def __init__(
        self,
        registry: Registry,
        arenas: Arenas,
        *,
        metrics: MetricsSettings | None = None,
        store: ResponseStore | None = None,
    ) -> None:
        self._registry = registry
        self._arenas = arenas
        self._metrics = metrics
        self._store = store

    async def load_version(
        self, directory: Path, version: int, loaded: LoadedConfig
    ) -> LoadedModel:
        """Loads a version, whose step models are loaded. Raises HostError."""
        config = complete_config(loaded)
        labels = await asyncio.to_thread(read_labels, directory, config)
        place_tensor = self._arenas.place_tensor
        ensemble = Ensemble(config, version, self._registry, place_tensor, self._metrics, labels)
        ensemble.metrics.set_namespace(loaded.namespace)
        if self._store is not None and config.response_cache.enable:
            ensemble.cache = ResponseCache(
                self._store, version, ensemble.counters, write_outputs, loaded.namespace
            )
        return ensemble

    async def update(
        self, model: LoadedModel, loaded: LoadedConfig, finalize: float
    ) -> InstanceUpdate | None:
        """Returns None: an ensemble has no instances, so that it is loaded again."""
        return None
