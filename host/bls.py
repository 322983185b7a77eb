"""Models as other models call them (BLS), and the detection of calls that wait for themselves."""

from __future__ import annotations

from collections.abc import Collection, Coroutine, Iterable, Sequence

from host.errors import HostError, internal, unavailable
from host.health import ServerState, is_model_ready
from host.inference.call import Call, CallHolder
from host.inference.request import InferRequest, KnownShapes, RequestTrace, checked_correlation_text
from host.models.registry import Model, NotServedError, OnDemand, Registry
from host.scheduling.ordering import OrderedCall
from host.scheduling.scheduler import Clock, LoopClock, Timer
from host.tracing.tracer import Tracer
from pb_utils import _model_texts as texts
from stub.wire.messages import TraceLink

_CHECK_INTERVAL_NS = 1_000_000_000
"""Interval of checks of open calls, as a cycle may form long after they were made."""

_Edges = list[list[Sequence["Call | CallHolder"]]]
"""What blocks a node: it is stuck if, in one of these ways, each list has a stuck member."""


class DeadlockDetector:
    """Checks BLS calls when they are made, and about once a second while they are open."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = LoopClock() if clock is None else clock
        self._timer: Timer | None = None
        self._open: dict[Call, None] = {}  # the newest last; some have finished
        self._tidy_at = 64
        self._old: Collection[Call] = ()  # were already open at the check before

    def add_call(self, call: Call) -> None:
        """Fails the call if it completes a cycle; otherwise watches it."""
        while not _can_progress(call):
            graph = WaitGraph([call], ())
            if not graph.is_in_cycle(call):
                break
            if not graph.let_overtake(call):
                _fail_call(call, graph.blocked_call(call))
                return
        self._open[call] = None
        if len(self._open) >= self._tidy_at:
            self._remove_finished()
        if self._timer is None:
            self._timer = self._clock.call_later(_CHECK_INTERVAL_NS, self._check_open_calls)

    def _remove_finished(self) -> None:
        self._open = {call: None for call in self._open if not call.finished}
        self._tidy_at = max(64, 2 * len(self._open))

    def _check_open_calls(self) -> None:
        """Fails the newest call of every cycle; each failure may unblock other calls.

        A cycle that ends if an instance overtakes others fails no call.
        """
        self._timer = None
        self._remove_finished()
        graph = WaitGraph(self._open, self._old)
        for call in reversed(list(self._open)):
            if not graph.stuck:
                break
            failed = False
            while not failed and graph.is_in_cycle(call):
                failed = not graph.let_overtake(call)
                if failed:
                    _fail_call(call, graph.blocked_call(call))
                graph = WaitGraph(self._open, self._old)
        self._remove_finished()
        self._old = set(self._open)
        if self._open:
            self._timer = self._clock.call_later(_CHECK_INTERVAL_NS, self._check_open_calls)


class WaitGraph:
    """The calls, queues and instances that some calls depend on, and which of them are stuck.

    A node is stuck if only a failure can let it end. A queued call is stuck if every instance of
    its model is and none is being replaced. An instance is stuck if its batch waits for a stuck
    call. A call is stuck if its response must wait for a stuck call. Potentially blocking calls
    count if they are among `old`.
    """

    def __init__(self, calls: Iterable[Call], old: Collection[Call]) -> None:
        self._ways: dict[int, _Edges] = {}
        todo: list[Call | CallHolder] = list(calls)
        while todo:
            node = todo.pop()
            if id(node) not in self._ways:
                ways = self._ways[id(node)] = _edges(node, old)
                todo += (other for way in ways for group in way for other in group)
        self.stuck = set(self._ways)
        self._remove_progressing()

    def _remove_progressing(self) -> None:
        stuck = self.stuck
        before = len(stuck) + 1
        while len(stuck) < before:
            before = len(stuck)
            for node in reversed(self._ways):  # chains end with the nodes found last
                if node in stuck and not any(
                    way and all(any(id(other) in stuck for other in group) for group in way)
                    for way in self._ways[node]
                ):
                    stuck.discard(node)

    def is_in_cycle(self, call: Call) -> bool:
        """Whether the call is stuck and waits for itself."""
        seen: set[int] = set()
        todo = [id(call)] if id(call) in self.stuck else []
        while todo:
            for way in self._ways[todo.pop()]:
                for group in way:
                    found = {id(other) for other in group} & self.stuck - seen
                    if id(call) in found:
                        return True
                    seen |= found
                    todo += found
        return False

    def let_overtake(self, call: Call) -> bool:
        """Lets the nearest instance overtake that the call waits for and that can; whether one did.

        The graph is outdated then.
        """
        seen: set[int] = set()
        todo: list[Call | CallHolder] = [call]
        for node in todo:
            if id(node) in self.stuck and id(node) not in seen:
                seen.add(id(node))
                if isinstance(node, CallHolder) and node.overtake():
                    return True
                todo += (other for way in self._ways[id(node)] for group in way for other in group)
        return False

    def blocked_call(self, call: Call) -> Call:
        """The call itself; for a call of an ensemble, the call of the step that is stuck."""
        seen: set[int] = set()
        todo: list[Call | CallHolder] = [call]
        while todo:
            node = todo.pop()
            if id(node) in seen or id(node) not in self.stuck or not isinstance(node, Call):
                continue
            seen.add(id(node))
            holder = node.holder
            queued = holder is not None and holder.instances is not None
            if queued or (isinstance(node, OrderedCall) and node.blocking_call is not None):
                return node
            if holder is not None:
                todo += holder.blocking_calls
        return call


def _can_progress(call: Call) -> bool:
    """Whether the call runs, or an instance will be free for it, without waiting for other calls.

    That is nearly always so, and this check costs a fraction of a graph.
    """
    if isinstance(call, OrderedCall) and call.blocking_call is not None:
        return False
    holder = call.holder
    if holder is None:
        return True
    instances = holder.instances
    for candidate in (holder,) if instances is None else instances:
        if not (candidate.resource_holders or candidate.blocking_calls or candidate.instances):
            return True
    return False


def _edges(node: Call | CallHolder, old: Collection[Call]) -> _Edges:
    if isinstance(node, Call):
        if node.finished:
            return []
        blocking = node.blocking_call if isinstance(node, OrderedCall) else None
        return [[[other for other in (node.holder, blocking) if other is not None]]]
    if node.instances is not None:
        return [] if node.may_recover() else [[[instance] for instance in node.instances]]
    if node.resource_holders:  # all instances that hold the resources must be stuck
        return [[[instance] for instance in node.resource_holders]]
    potentially_blocking = node.potentially_blocking_calls if old else ()
    return [
        [list(node.blocking_calls)],
        [[call for call in group if call in old] for group in potentially_blocking],
    ]


def _fail_call(call: Call, held_up: Call) -> None:
    """Fails a call of a cycle; `held_up` is the call that cannot continue."""
    name, busy = call.request.model_name, held_up.request.model_name
    called = "it" if busy == name else f"'{name}'"
    holder = held_up.holder
    instances = None if holder is None else holder.instances
    queued = instances is not None
    if isinstance(held_up, OrderedCall) and held_up.blocking_call is not None and not queued:
        why = (
            f"model '{busy}' keeps the order of its responses, and an earlier request waits for"
            f" this one. Do without 'preserve_ordering', or do not call '{name}' from a model"
            " that it calls"
        )
    elif any(instance.resource_holders for instance in instances or ()):
        why = (
            f"resources that model '{busy}' needs are held by a request that waits for this one."
            " Let the two models need different resources, or raise --rate-limit-resource"
        )
    else:
        why = (
            f"every instance of model '{busy}' is busy with a request that waits for this one."
            f" Raise the instance_group count of '{busy}', or do not call {called} from a model"
            " that it calls"
        )
    call.abort(
        internal(
            f"Model {name} - Error when running inference: the request waits for itself: {why}"
        )
    )


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
        first. Raises HostError, at once or when awaited (docs/reference/model-bls.md, "Errors").
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
