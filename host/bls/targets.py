"""Models as other models call them (BLS)."""

from __future__ import annotations

from collections.abc import Awaitable

from host.bls.deadlock_detector import DeadlockDetector
from host.errors import HostError, internal, unavailable
from host.health.model_readiness import is_model_ready
from host.health.server_state import ServerState
from host.inference.call import Call
from host.inference.correlation_id import checked_correlation_text
from host.inference.request import InferRequest, RequestTrace
from host.models.registry import Model, Registry
from host.tracing.tracer import Tracer
from stub.wire.payload import TraceLink


class BlsTargets:
    """Starts the BLS requests of all stubs. Belongs to the event loop."""

    def __init__(self, registry: Registry, state: ServerState, tracer: Tracer) -> None:
        self._registry = registry
        self._state = state
        self._tracer = tracer
        self._deadlocks = DeadlockDetector()

    def check_bls_target(self, request: InferRequest) -> Awaitable[None] | None:
        """Returns what a BLS request has to await first, if its target model defines `is_ready`.

        Raises HostError, at once or when awaited (docs/reference/model_api.md, 5.3).
        """
        try:
            model = self._find_bls_target(request)
        except HostError as error:
            raise _bls_error(request, error) from error
        return self._check_target_ready(request, model) if model.defines_is_ready else None

    async def _check_target_ready(self, request: InferRequest, model: Model) -> None:
        if not await is_model_ready(model):
            raise _bls_error(request, _model_not_ready_error(request.model_name))

    def infer_for_bls(self, request: InferRequest, decoupled: bool) -> Call:
        """Starts a BLS request. Raises HostError (docs/reference/model_api.md, 5.3)."""
        name = request.model_name
        try:
            model = self._find_bls_target(request)
            if not decoupled and model.config.model_transaction_policy.decoupled:
                raise internal(
                    f"Model {name} is using the decoupled. The current BLS request call doesn't"
                    " support models using the decoupled transaction policy. Please use"
                    " 'decoupled=True' argument to the 'exec' or 'async_exec' calls for decoupled"
                    " models.'"
                )
            if isinstance(request.correlation_id, str):
                checked_correlation_text(request.correlation_id)
            return model.infer(request)
        except HostError as error:
            raise _bls_error(request, error) from error

    def _find_bls_target(self, request: InferRequest) -> Model:
        if not self._state.started:
            raise unavailable("Server not ready")
        try:
            model = self._registry.find(request.model_name, request.model_version)
        except HostError as error:
            raise _model_not_ready_error(request.model_name) from error
        if not model.ready:
            raise _model_not_ready_error(request.model_name)
        return model

    def create_child_trace(self, link: TraceLink | None) -> RequestTrace | None:
        """The trace of a BLS request; None if the request that caused it is not traced any more."""
        if link is None:
            return None
        above = self._tracer.find_trace(link.number)
        return None if above is None else above.create_child()

    def break_deadlock(self, call: Call) -> None:
        """Fails a BLS call that waits for itself, now or when a cycle forms."""
        self._deadlocks.add_call(call)


def _model_not_ready_error(name: str) -> HostError:
    return internal(f"Failed for execute the inference request. Model '{name}' is not ready.")


def _bls_error(request: InferRequest, error: HostError) -> HostError:
    return internal(f"Model {request.model_name} - Error when running inference: {error.message}")
