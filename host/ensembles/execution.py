"""Executes one request to an ensemble; each step starts as soon as its inputs are there."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from host.ensembles.plan import (
    EnsembleSignature,
    EnsembleStep,
    EnsembleTensor,
    Route,
    SequencePosition,
    StepModel,
)
from host.ensembles.step_limits import FlowControl, InflightLimiter, Permit, ResponseCredit
from host.errors import HostError, invalid_argument, unexpected_failure
from host.inference.call import Call, CallHolder, ComputeCallback
from host.inference.request import InferRequest, InferResponse, Tensor
from host.instances.arenas import arena_full_error
from host.instances.regions import write_outputs
from stub.wire.arena import ArenaFull

_log = logging.getLogger("pbhost")


class StepExecution:
    """One execution of a step. `call` is set once the step has been submitted."""

    __slots__ = ("call", "correlation", "iteration", "credits", "step", "permit", "waits", "held")

    def __init__(self, step: EnsembleStep, iteration: int) -> None:
        self.step = step
        self.iteration = iteration
        self.correlation: SequencePosition
        self.call: Call | None = None
        self.permit: Permit | None = None
        self.waits = False  # for its permit, or for its turn to end
        self.credits: list[ResponseCredit] = []
        self.held: deque[tuple[InferResponse | None, bool]] | None = None
        """Responses that wait for those of earlier executions, and whether they are final."""


class StepOrder:
    """The executions of one step, in the order in which their responses are used."""

    __slots__ = ("executions", "delivers")

    def __init__(self) -> None:
        self.executions: deque[StepExecution] = deque()
        self.delivers = False


class EnsembleExecution(CallHolder):
    """Executes one request.

    `step_models`: the models of the steps, by index. `ended`: called at the end.

    Tensors have an iteration number: a decoupled step numbers its responses, and whatever is
    computed from one has its number. One response of the ensemble consists of tensors with the same
    number (docs/reference/ensembles.md, "Execution"). If the ensemble is
    ordered, the responses of a step are used in the order in which its executions were started.
    """

    def __init__(
        self,
        signature: EnsembleSignature,
        call: Call,
        route: Route,
        step_models: Mapping[int, StepModel],
        place_tensor: Callable[[Tensor], None],
        limiter: InflightLimiter | None,
        ended: Callable[[EnsembleExecution], None],
    ) -> None:
        self.call = call
        self.spent = 0, 0, 0
        """Nanoseconds that steps spent on inputs, inference and outputs."""
        self.failed_inside = False
        """Whether the request failed in one of its steps."""
        self.on_late: ComputeCallback | None = None
        """Called with the times of steps that end after the request."""
        self._signature = signature
        self._request = call.request
        self._correlation = SequencePosition(call.request.correlation_id, call.request.flags)
        self._route = route
        self._step_models = step_models
        self._place_tensor = place_tensor
        self._limiter = limiter
        self._ended = ended
        self._values: dict[tuple[str, int], EnsembleTensor] = {}
        self._executions: dict[StepExecution, None] = {}
        self._made: dict[int, int] = {}  # responses of decoupled steps so far
        # By step; None if there is no order to keep, or any more.
        self._orders: dict[int, StepOrder] | None = (
            {} if signature.decoupled and signature.ordered else None
        )
        self._error: HostError | None = None
        self._answers = 0
        # Responses that the caller has not acknowledged.
        self._sent: dict[int, list[ResponseCredit]] = {}
        self._flow_control = FlowControl(call.request, limiter is not None, self._executions)
        self._over = False

    @property
    def blocking_calls(self) -> list[Call]:
        """The calls of steps in progress."""
        return [execution.call for execution in self._executions if execution.call is not None]

    def start(self) -> None:
        """Starts the steps that need nothing but the inputs of the request."""
        call, request = self.call, self._request
        call.holder = self
        call.on_response_acknowledged = (
            self._response_acknowledged if self._signature.decoupled else None
        )
        try:
            self._add_inputs(request)
        except Exception as error:
            self._fail_with_exception(error)
        self._finish_if_idle()

    def _add_inputs(self, request: InferRequest) -> None:
        correlation = self._correlation
        given = {tensor.name: tensor for tensor in request.inputs}
        request.inputs = []  # each tensor is released when the last step that uses it ends
        size = request.batch_size if self._signature.batches else 0
        inputs = {
            name: EnsembleTensor(given.get(name), size, correlation, 0)
            for name in self._route.inputs
            if name in given or name in self._route.optional
        }
        del given
        self._add_tensors(inputs, 0)

    # Tensors

    def _add_tensors(self, made: Mapping[str, EnsembleTensor], iteration: int) -> None:
        """Adds tensors of one iteration, and starts the steps that they complete."""
        route, values = self._route, self._values
        starting: dict[EnsembleStep, None] = {}
        for name, value in made.items():
            uses = route.uses.get(name, 0)
            if uses:
                value.uses = uses
                if uses > 1 and value.tensor is not None:
                    try:
                        self._place_tensor(value.tensor)
                    except ArenaFull as full:
                        self._fail(arena_full_error(full))
                        return
                values[name, iteration] = value
        for name in made:
            for step in route.users.get(name, ()):
                if len(step.sources) == 1 or self._has_tensors(step.sources, iteration):
                    starting[step] = None
        for step in starting:
            if self._error is None and not self._over:
                self._start_step(step, iteration)
        if self._error is None and not self._over and self._has_tensors(route.outputs, iteration):
            self._send_response(iteration)

    def _has_tensors(self, names: Iterable[str], iteration: int) -> bool:
        values = self._values
        for name in names:
            if (name, iteration) not in values:
                return False
        return True

    def _consume_tensor(self, name: str, iteration: int) -> EnsembleTensor:
        """Takes a tensor for one use; the last use removes it."""
        key = name, iteration
        value = self._values[key]
        value.uses -= 1
        if not value.uses:
            del self._values[key]
        return value

    # Steps

    def _start_step(self, step: EnsembleStep, iteration: int) -> None:
        execution = StepExecution(step, iteration)
        self._executions[execution] = None
        if self._orders is not None:
            self._orders.setdefault(step.index, StepOrder()).executions.append(execution)
        try:
            request = self._build_step_request(execution)
        except Exception:  # of any kind, raised again: the step must not stay in the books
            self._step_not_submitted(execution)
            raise
        if self._limiter is None:
            self._submit_step(execution, request)
        else:
            permit = Permit(step.index, partial(self._submit_step, execution, request))
            execution.permit = permit  # a step that ends at once gives it back
            self._limiter.request_permit(permit)
            if permit.waits:
                execution.waits = True
                self._flow_control.step_waits()

    def _build_step_request(self, execution: StepExecution) -> InferRequest:
        """The request of a step, with the parameters and the timeout of the ensemble's request."""
        step, asked, iteration = execution.step, self._request, execution.iteration
        step_model = self._step_models[step.index]
        correlation = self._correlation
        values = {name: self._consume_tensor(name, iteration) for name in step.sources}
        inputs: list[Tensor] = []
        for name, source in step.inputs:
            value = values[source]
            tensor = value.to_step_input(name, step_model.dims.get(name, ()), step_model.batches)
            if tensor is not None:
                inputs.append(tensor)
            if value.correlation.own:
                correlation = value.correlation
        execution.credits = [value.credit for value in values.values() if value.credit is not None]
        execution.correlation = correlation
        request = InferRequest(
            step.model,
            inputs,
            step_model.model.version,
            asked.id,
            list(step.outputs),
            asked.parameters,
            correlation.id,
            correlation.flags,
            asked.priority,
            asked.timeout_us,
            None if asked.trace is None else asked.trace.create_child(),
            output_placement_hints=self._output_placement_hints(execution),
            max_outstanding_responses=self._flow_control.max_outstanding_responses
            if step_model.decoupled
            else 0,
            ancestors=asked.ancestors,
        )
        request.shape = step_model.shapes.find(request)
        return request

    def _output_placement_hints(self, execution: StepExecution) -> dict[str, object] | None:
        """The client's memory for outputs that only this step computes and no other step takes.

        Only for the last step: a step still to come may read the client's memory as an input.
        """
        wanted = self._request.output_placement or self._request.output_placement_hints
        if not wanted or self._signature.decoupled or self._values or len(self._executions) > 1:
            return None
        return {
            output: wanted[name]
            for output, name in execution.step.outputs.items()
            if name in wanted and name in self._route.outputs and name not in self._route.users
        }

    def _submit_step(self, execution: StepExecution, request: InferRequest) -> None:
        if execution.permit is not None:
            execution.permit.start = _nothing  # the call holds the request, and with it the tensors
            self._stop_waiting(execution)
        try:
            call = self._step_models[execution.step.index].model.infer(request)
        except Exception as error:
            self._step_not_submitted(execution)
            if isinstance(error, HostError):
                self._fail(error)
            else:
                self._fail_with_exception(error)
            self._finish_if_idle()
            return
        execution.call = call
        call.subscribe(
            partial(
                self._step_responded if self._orders is None else self._use_in_order,
                execution,
                call,
            ),
            self._record_compute_times,
        )

    def _stop_waiting(self, execution: StepExecution) -> None:
        """Ends the wait of a step for its permit."""
        if execution.waits:
            execution.waits = False
            self._flow_control.step_stops_waiting()

    def _record_compute_times(self, input_ns: int, infer_ns: int, output_ns: int) -> None:
        if self.on_late is not None:
            self.on_late(input_ns, infer_ns, output_ns)
            return
        inputs, infer, outputs = self.spent
        self.spent = inputs + input_ns, infer + infer_ns, outputs + output_ns

    def _use_in_order(
        self, execution: StepExecution, call: Call, response: InferResponse | None, final: bool
    ) -> None:
        """As `_step_responded`, after all responses of earlier executions of the step."""
        if self._orders is None:
            self._step_responded(execution, call, response, final)
            return
        order = self._orders[execution.step.index]
        executions = order.executions
        first = executions[0] is execution
        if first and not order.delivers:
            order.delivers = True
            if final:
                executions.popleft()
            self._step_responded(execution, call, response, final)
            if executions and executions[0].held:
                self._use_held_responses(executions)
            order.delivers = False
            return
        if execution.held is None:
            execution.held = deque()
        execution.held.append((response, final))
        if final and not first:
            self._release_permit(execution)

    def _use_held_responses(self, executions: deque[StepExecution]) -> None:
        """Uses what has arrived of the first executions."""
        while executions and (held := executions[0].held):
            execution = executions[0]
            response, final = held.popleft()
            if final:
                executions.popleft()
            assert execution.call is not None
            self._step_responded(execution, execution.call, response, final)

    def _release_order(self) -> None:
        """Ends the wait of responses for others, as none of them will be used."""
        orders, self._orders = self._orders, None
        for order in (orders or {}).values():
            executions, order.executions = order.executions, deque()
            for execution in executions:
                while execution.held and execution.call is not None:
                    self._step_responded(execution, execution.call, *execution.held.popleft())

    def _step_responded(
        self, execution: StepExecution, call: Call, response: InferResponse | None, final: bool
    ) -> None:
        if final:
            self._executions.pop(execution, None)
        try:
            if response is None:
                pass
            elif response.error is not None:
                self._fail(response.error)
            elif self._error is None and not self._over:
                self._take_outputs(execution, call, response, final)
            elif not final:
                call.acknowledge_response(response)  # lets the step finish
        except Exception as error:
            self._fail_with_exception(error)
        finally:
            if final:
                self._step_finished(execution)  # steps that follow have queued for permits by now
                self._finish_if_idle()

    def _step_not_submitted(self, execution: StepExecution) -> None:
        """Releases what a step holds that was never submitted."""
        del self._executions[execution]
        self._step_finished(execution)

    def _step_finished(self, execution: StepExecution) -> None:
        """Gives the permit and the tensors of a step back."""
        permit, execution.permit = execution.permit, None
        if permit is not None and self._limiter is not None:
            self._limiter.release_permit(permit)
        self._stop_waiting(execution)
        credits, execution.credits = execution.credits, []
        for credit in credits:
            credit.release()
        self._flow_control.acknowledge_waiting()

    def _release_permit(self, execution: StepExecution) -> None:
        """Lets other requests have the permit of a step whose responses wait for others.

        The models before it send no more meanwhile. Those of a decoupled step may be waited for.
        """
        permit, execution.permit = execution.permit, None
        if permit is not None and self._limiter is not None:
            if not self._step_models[execution.step.index].decoupled:
                execution.waits = True
                self._flow_control.step_waits()
            self._limiter.release_permit(permit)

    def _take_outputs(
        self, execution: StepExecution, call: Call, response: InferResponse, final: bool
    ) -> None:
        step, uses = execution.step, self._route.uses
        step_model = self._step_models[step.index]
        iteration = execution.iteration
        if step_model.decoupled:
            iteration = self._made.get(step.index, 0)
            self._made[step.index] = iteration + 1
        try:
            correlation = execution.correlation.updated_by(response.parameters)
        except HostError as error:
            self._fail(error)
            if not final:
                call.acknowledge_response(response)
            return
        credit, needed = None, 0
        if not final:
            needed = sum(uses.get(name, 0) for name in step.outputs.values())
            credit = ResponseCredit(self._flow_control, call, response, needed)
        size = call.request.batch_size if step_model.batches else 0
        produced = {tensor.name: tensor for tensor in response.outputs}
        made = {
            name: EnsembleTensor(produced.get(output), size, correlation, 0, credit)
            for output, name in step.outputs.items()
        }
        self._add_tensors(made, iteration)
        if credit is not None:
            self._flow_control.tensors_used(credit, needed > 0)

    # Responses

    def _send_response(self, iteration: int) -> None:
        signature, request = self._signature, self._request
        response = InferResponse(signature.name, signature.version, request.id)
        credits: list[ResponseCredit] = []
        for name in self._route.outputs:
            value = self._consume_tensor(name, iteration)
            tensor = value.to_step_input(name, signature.dims[name], signature.batches)
            if tensor is not None:
                response.outputs.append(tensor)
                if len(tensor.data):
                    response.parameters = value.correlation.to_parameters()
            if value.credit is not None:
                credits.append(value.credit)
        if request.output_placement:
            response.error = write_outputs(request.output_placement, response.outputs)
        if credits:
            self._sent[id(response)] = credits
        self._answers += 1
        if self._executions and signature.decoupled:
            self._flow_control.response_sent(response)
        self.call.respond(response, not self._executions)

    def _response_acknowledged(self, response: InferResponse) -> None:
        try:
            self._flow_control.response_acknowledged(response)
            for credit in self._sent.pop(id(response), ()):
                credit.release()
        except Exception as error:
            self._fail_with_exception(error)
            self._finish_if_idle()

    # End

    def _fail(self, error: HostError) -> None:
        """Keeps the first error, which is the answer once no step is in progress."""
        if self._error is None and not self._over:
            self._error = HostError(
                error.code, f"in ensemble '{self._signature.name}', {error.message}"
            )
            self.failed_inside = True
            self._drop_tensors()

    def _fail_with_exception(self, error: Exception) -> None:
        """Logs an unexpected exception, and ends the request with it; cancels the running steps."""
        _log.error(
            "unexpected failure of a request to ensemble '%s'",
            self._signature.name,
            exc_info=error,
        )
        failure = unexpected_failure(error)
        self._fail(failure)
        for execution in list(self._executions):
            if execution.call is not None:
                execution.call.abort(failure)

    def _drop_tensors(self) -> None:
        """Releases the tensors that no step will use."""
        self._flow_control.release_all()
        self._release_order()
        values, self._values = self._values, {}
        for value in values.values():
            if value.credit is not None:
                value.credit.release(value.uses)
        if self._limiter is not None:
            for execution in [
                execution for execution in self._executions if execution.call is None
            ]:
                if execution.permit is not None and execution.permit.waits:
                    self._step_not_submitted(execution)

    def _finish_if_idle(self) -> None:
        """Ends the request if no step is in progress."""
        if self._executions or self._over:
            return
        self._over = True
        call = self.call
        if not call.finished:
            if self._error is not None:
                call.fail(self._error)
            elif self._answers or self._signature.decoupled:
                call.respond(None)
            else:
                name = self._request.id or "<id_unknown>"
                self.failed_inside = True
                call.fail(
                    invalid_argument(
                        f"in ensemble '{self._signature.name}', [request id: {name}] unexpected"
                        " deadlock, at least one output is not set while no more ensemble steps"
                        " can be made"
                    )
                )
        self._finish()

    def cancel_call(self, call: Call) -> bool:
        """Starts no further step and cancels those in progress, as the caller has gone."""
        self._over = True
        self._drop_tensors()
        for execution in list(self._executions):
            if execution.call is not None:
                execution.call.cancel()
        self._finish()
        return False

    def _finish(self) -> None:
        self._drop_tensors()
        self._sent.clear()
        self.call.holder = self.call.on_response_acknowledged = None
        self._ended(self)


def _nothing() -> None:
    pass
