"""One request to an ensemble: each step starts as soon as all that it takes is there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from host.ensembles.flow_control import Lease, Pace
from host.ensembles.inflight_limiter import Limiter, Ticket
from host.ensembles.plan import Route, Step
from host.ensembles.step_models import Face, Partner, TensorMemory
from host.ensembles.values import Correlation, Value
from host.errors import HostError, invalid_argument
from host.inference.request import Call, ComputeCallback, InferRequest, InferResponse, Tensor


class _Flight:
    """A step under way for one iteration; `call` is there once it has been submitted."""

    __slots__ = ("call", "correlation", "iteration", "leases", "step", "ticket", "waits")

    def __init__(self, step: Step, iteration: int) -> None:
        self.step = step
        self.iteration = iteration
        self.correlation: Correlation
        self.call: Call | None = None
        self.ticket: Ticket | None = None
        self.waits = False  # for its turn
        self.leases: list[Lease] = []


class Run:
    """`partners` run the steps of the route, by their index; `ended` hears of the end.

    Tensors are numbered: those of a decoupled member by its responses, and what is made of one
    has its number. All that makes one response of the ensemble has the same (spec 6.3).
    """

    def __init__(
        self,
        face: Face,
        call: Call,
        route: Route,
        partners: Mapping[int, Partner],
        memory: TensorMemory,
        limiter: Limiter | None,
        ended: Callable[[Run], None],
    ) -> None:
        self.call = call
        self.spent = 0, 0, 0
        """Nanoseconds of members on inputs, inference and outputs."""
        self.failed_inside = False
        """Whether it fails because of what happened on the way."""
        self.on_late: ComputeCallback | None = None
        """Who is to know of what is spent from now on."""
        self._face = face
        self._request = call.request
        self._correlation = Correlation(call.request.correlation_id, call.request.flags)
        self._route = route
        self._partners = partners
        self._memory = memory
        self._limiter = limiter
        self._ended = ended
        self._values: dict[tuple[str, int], Value] = {}
        self._flights: dict[_Flight, None] = {}
        self._made: dict[int, int] = {}  # responses so far of decoupled steps
        self._error: HostError | None = None
        self._answers = 0
        self._given: dict[int, list[Lease]] = {}  # responses that the asker has not taken yet
        self._pace = Pace(call.request, limiter is not None, self._flights)
        self._over = False

    @property
    def waiting_for(self) -> list[Call]:
        """The members' calls under way."""
        return [flight.call for flight in self._flights if flight.call is not None]

    def begin(self) -> None:
        """Start what the request's own tensors are enough for."""
        call, request = self.call, self._request
        call.holder = self
        call.on_cancel = self._cancel
        call.on_response_acknowledged = self._taken if self._face.decoupled else None
        correlation = self._correlation
        given = {tensor.name: tensor for tensor in request.inputs}
        request.inputs = []  # each goes when the last step that takes it has ended
        size = request.batch_size if self._face.batches else 0
        inputs = {
            name: Value(given.get(name), size, correlation, 0)
            for name in self._route.inputs
            if name in given or name in self._route.optional
        }
        del given
        self._add(inputs, 0)
        self._settle()

    # Tensors come

    def _add(self, made: Mapping[str, Value], iteration: int) -> None:
        """Take tensors of one number in, and do what can be done now."""
        route, values = self._route, self._values
        starting: dict[Step, None] = {}
        for name, value in made.items():
            uses = route.uses.get(name, 0)
            if uses:
                value.uses = uses
                if uses > 1 and value.tensor is not None:
                    try:
                        self._memory.share(value.tensor)
                    except HostError as error:
                        self._fail(error)
                        return
                values[name, iteration] = value
        for name in made:
            for step in route.users.get(name, ()):
                if len(step.sources) == 1 or self._has(step.sources, iteration):
                    starting[step] = None
        for step in starting:
            if self._error is None and not self._over:
                self._start(step, iteration)
        if self._error is None and not self._over and self._has(route.outputs, iteration):
            self._respond(iteration)

    def _has(self, names: Iterable[str], iteration: int) -> bool:
        values = self._values
        for name in names:
            if (name, iteration) not in values:
                return False
        return True

    def _use(self, name: str, iteration: int) -> Value:
        """One of those that need the tensor has got it; after the last one it is let go."""
        key = name, iteration
        value = self._values[key]
        value.uses -= 1
        if not value.uses:
            del self._values[key]
        return value

    # Steps

    def _start(self, step: Step, iteration: int) -> None:
        flight = _Flight(step, iteration)
        self._flights[flight] = None
        request = self._request_of(flight)
        if self._limiter is None:
            self._submit(flight, request)
        else:
            flight.ticket = Ticket(step.index, partial(self._submit, flight, request))
            self._limiter.enter(flight.ticket)
            if flight.ticket.waits:
                flight.waits = True
                self._pace.wait()

    def _request_of(self, flight: _Flight) -> InferRequest:
        """What the member is asked. It is told all that the ensemble was told."""
        step, asked, iteration = flight.step, self._request, flight.iteration
        partner = self._partners[step.index]
        correlation = self._correlation
        values = {name: self._use(name, iteration) for name in step.sources}
        inputs: list[Tensor] = []
        for name, source in step.inputs:
            value = values[source]
            tensor = value.named(name, partner.dims.get(name, ()), partner.batches)
            if tensor is not None:
                inputs.append(tensor)
            if value.correlation.own:
                correlation = value.correlation
        flight.leases = [value.lease for value in values.values() if value.lease is not None]
        flight.correlation = correlation
        return InferRequest(
            step.model,
            inputs,
            partner.model.version,
            asked.id,
            list(step.outputs),
            asked.parameters,
            correlation.id,
            correlation.flags,
            asked.priority,
            asked.timeout_us,
            None if asked.trace is None else asked.trace.create_child(),
            output_placement_hints=self._offers(flight),
            validation_key=partner.form_of(inputs),
            max_outstanding_responses=self._pace.window if partner.decoupled else 0,
        )

    def _offers(self, flight: _Flight) -> dict[str, object] | None:
        """Where the client wants what this step makes, and no other step takes.

        Only if no other is left: one may still read what lies there, the client's own inputs.
        """
        wanted = self._request.output_placement or self._request.output_placement_hints
        if not wanted or self._face.decoupled or self._values or len(self._flights) > 1:
            return None
        return {
            output: wanted[name]
            for output, name in flight.step.outputs.items()
            if name in wanted and name in self._route.outputs and name not in self._route.users
        }

    def _submit(self, flight: _Flight, request: InferRequest) -> None:
        if flight.ticket is not None:
            flight.ticket.start = _nothing  # it has the request, and with it the tensors
            self._go(flight)
        try:
            call = self._partners[flight.step.index].model.infer(request)
        except HostError as error:
            self._land(flight)
            self._fail(error)
            self._settle()
            return
        flight.call = call
        call.on_computed = self._computed
        call.subscribe(partial(self._answered, flight, call))

    def _go(self, flight: _Flight) -> None:
        """It does not wait for its turn any more."""
        if flight.waits:
            flight.waits = False
            self._pace.turn()

    def _computed(self, input_ns: int, infer_ns: int, output_ns: int) -> None:
        if self.on_late is not None:
            self.on_late(input_ns, infer_ns, output_ns)
            return
        inputs, infer, outputs = self.spent
        self.spent = inputs + input_ns, infer + infer_ns, outputs + output_ns

    def _answered(
        self, flight: _Flight, call: Call, response: InferResponse | None, final: bool
    ) -> None:
        if final:
            del self._flights[flight]
        try:
            if response is None:
                pass
            elif response.error is not None:
                self._fail(response.error)
            elif self._error is None and not self._over:
                self._take(flight, call, response, final)
            elif not final:
                call.acknowledge_response(response)  # the member is to come to its end
        finally:
            if final:
                self._leave(flight)  # those after it wait by now, if they have to
                self._settle()

    def _land(self, flight: _Flight) -> None:
        """A step was never submitted."""
        del self._flights[flight]
        self._leave(flight)

    def _leave(self, flight: _Flight) -> None:
        """A step has given its place to others, and uses no tensors any more."""
        if flight.ticket is not None and self._limiter is not None:
            self._limiter.leave(flight.ticket)
            self._go(flight)
        for lease in flight.leases:
            lease.end()
        self._pace.go_on()

    def _take(self, flight: _Flight, call: Call, response: InferResponse, final: bool) -> None:
        step, uses = flight.step, self._route.uses
        partner = self._partners[step.index]
        iteration = flight.iteration
        if partner.decoupled:
            iteration = self._made.get(step.index, 0)
            self._made[step.index] = iteration + 1
        try:
            correlation = flight.correlation.changed_by(response.parameters)
        except HostError as error:
            self._fail(error)
            if not final:
                call.acknowledge_response(response)
            return
        lease, needed = None, 0
        if not final:
            needed = sum(uses.get(name, 0) for name in step.outputs.values())
            lease = Lease(self._pace, call, response, needed)
        size = call.request.batch_size if partner.batches else 0
        produced = {tensor.name: tensor for tensor in response.outputs}
        made = {
            name: Value(produced.get(output), size, correlation, 0, lease)
            for output, name in step.outputs.items()
        }
        self._add(made, iteration)
        if lease is not None:
            self._pace.sent_on(lease, needed > 0)

    # Responses

    def _respond(self, iteration: int) -> None:
        face, request = self._face, self._request
        response = InferResponse(face.name, face.version, request.id)
        leases: list[Lease] = []
        for name in self._route.outputs:
            value = self._use(name, iteration)
            tensor = value.named(name, face.dims[name], face.batches)
            if tensor is not None:
                response.outputs.append(tensor)
                response.parameters = value.correlation.parameters()
            if value.lease is not None:
                leases.append(value.lease)
        if request.output_placement:
            response.error = self._memory.deliver(request.output_placement, response.outputs)
        if leases:
            self._given[id(response)] = leases
        self._answers += 1
        if self._flights and face.decoupled:
            self._pace.give(response)
        self.call.respond(response, not self._flights)

    def _taken(self, response: InferResponse) -> None:
        self._pace.taken(response)
        for lease in self._given.pop(id(response), ()):
            lease.end()

    # Ends

    def _fail(self, error: HostError) -> None:
        """The first error is the answer, once nothing is under way any more."""
        if self._error is None and not self._over:
            self._error = HostError(error.code, f"in ensemble '{self._face.name}', {error.message}")
            self.failed_inside = True
            self._drop()

    def _drop(self) -> None:
        """What is left will not be used."""
        self._pace.let_go()
        values, self._values = self._values, {}
        for value in values.values():
            if value.lease is not None:
                value.lease.end(value.uses)
        if self._limiter is not None:
            for flight in [flight for flight in self._flights if flight.call is None]:
                if flight.ticket is not None and flight.ticket.waits:
                    self._land(flight)

    def _settle(self) -> None:
        """Come to the end if nothing is under way."""
        if self._flights or self._over:
            return
        self._over = True
        call = self.call
        if not call.finished:
            if self._error is not None:
                call.fail(self._error)
            elif self._answers or self._face.decoupled:
                call.respond(None)
            else:
                name = self._request.id or "<id_unknown>"
                self.failed_inside = True
                call.fail(
                    invalid_argument(
                        f"in ensemble '{self._face.name}', [request id: {name}] unexpected"
                        " deadlock, at least one output is not set while no more ensemble steps"
                        " can be made"
                    )
                )
        self._end()

    def _cancel(self, call: Call) -> None:
        """Nobody waits any more: nothing is started, and what is under way is told to stop."""
        self._over = True
        self._drop()
        for flight in list(self._flights):
            if flight.call is not None:
                flight.call.cancel()
        self._end()

    def _end(self) -> None:
        self._drop()
        self._given.clear()
        self.call.holder = self.call.on_cancel = self.call.on_response_acknowledged = None
        self._ended(self)


def _nothing() -> None:
    pass
