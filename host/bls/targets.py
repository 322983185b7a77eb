"""Models as other models call them (BLS)."""

from __future__ import annotations

from collections.abc import Coroutine

from host.bls.deadlock_detector import DeadlockDetector
from host.errors import HostError, internal, unavailable
from host.health.health import ServerState, is_model_ready
from host.inference.call import Call
from host.inference.request import InferRequest, KnownShapes, RequestTrace, checked_correlation_text
from host.models.registry import Model, NotServedError, OnDemand, Registry
from host.tracing.tracer import Tracer
from pb_utils import _model_texts as texts
from stub.wire.payload import TraceLink


class BlsTargets:
    """Starts the BLS requests of all stubs. Belongs to the event loop."""

    def __init__(self, registry: Registry, state: ServerState, tracer: Tracer) -> None:
        self._registry = registry
        self._state = state
        self._tracer = tracer
        self._deadlocks = DeadlockDetector()
        self._shapes = KnownShapes()
        self.on_demand: OnDemand | None = None
        """Loads models that are asked for; None if no model loads on demand."""

    def infer_for_bls(
        self, request: InferRequest, decoupled: bool
    ) -> Call | Coroutine[None, None, Call]:
        """Starts a BLS request.

        Returns a coroutine for it if its target model defines `is_ready`, or has to be loaded
        first. Raises HostError, at once or when awaited (docs/reference/model-api.md, "Errors").
        """
        try:
            model = self._find_bls_target(request)
        except HostError as error:
            if isinstance(error, NotServedError) and self.on_demand is not None:
                return self._start_when_loaded(self.on_demand, request, decoupled)
            raise _bls_error(request, error) from error
        if model.defines_is_ready:
            return self._start_when_ready(request, decoupled, model)
        return self._start_call(request, decoupled, model)

    async def _start_when_loaded(
        self, on_demand: OnDemand, request: InferRequest, decoupled: bool
    ) -> Call:
        """Loads the target model first. Raises HostError."""
        try:
            model = await on_demand.start_when_loaded(
                request, lambda: self._find_bls_target(request)
            )
        except HostError as error:
            raise _bls_error(request, error) from error
        if model.defines_is_ready:
            return await self._start_when_ready(request, decoupled, model)
        return self._start_call(request, decoupled, model)

    async def _start_when_ready(self, request: InferRequest, decoupled: bool, model: Model) -> Call:
        try:
            if not await is_model_ready(model):
                raise _model_not_ready_error(request.model_name)
            model = self._find_bls_target(request)  # it may have been replaced meanwhile
        except HostError as error:
            raise _bls_error(request, error) from error
        return self._start_call(request, decoupled, model)

    def _start_call(self, request: InferRequest, decoupled: bool, model: Model) -> Call:
        name = request.model_name
        try:
            if not decoupled and model.config.model_transaction_policy.decoupled:
                raise internal(texts.decoupled_needed_for_bls(name))
            if isinstance(request.correlation_id, str):
                checked_correlation_text(request.correlation_id)
            return self._infer(model, request)
        except HostError as error:
            raise _bls_error(request, error) from error

    def _infer(self, model: Model, request: InferRequest) -> Call:
        """Starts a request with the shape of equal ones. Raises HostError."""
        request.shape = self._shapes.find(request)
        return model.infer(request)

    def _find_bls_target(self, request: InferRequest) -> Model:
        if not self._state.started:
            raise unavailable("Server not ready")
        model = self._registry.find(request.model_name, request.model_version)
        if not model.ready:
            raise _model_not_ready_error(request.model_name)
        return model

    def create_child_trace(self, link: TraceLink | None) -> RequestTrace | None:
        """The trace of a BLS request; None if the request that caused it is no longer traced."""
        if link is None:
            return None
        above = self._tracer.find_trace(link.number)
        return None if above is None else above.create_child()

    def break_deadlock(self, call: Call) -> None:
        """Fails a BLS call that waits for itself, now or when a cycle forms."""
        self._deadlocks.add_call(call)


def _model_not_ready_error(name: str) -> HostError:
    return internal(texts.not_ready_for_bls(name))


def _bls_error(request: InferRequest, error: HostError) -> HostError:
    return internal(texts.failed_bls(request.model_name, error.message))
