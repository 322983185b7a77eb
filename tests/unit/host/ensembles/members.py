"""Models that run in memory, and ensembles of them. Each tensor is one INT8."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from host.config.pbtxt import parse_pbtxt
from host.config.schema import ModelConfig
from host.ensembles.compatibility import check_step_models
from host.ensembles.ensemble import Ensemble
from host.errors import HostError
from host.inference.call import Call, CallHolder
from host.inference.request import ExecutionTimes, InferRequest, InferResponse, Tensor, read_bytes
from host.inference.validation import Signature
from host.metrics.latency import MetricsSettings
from host.metrics.model_metrics import ModelMetrics
from host.metrics.statistics import InferenceCounters
from host.models.draining import DrainableModel
from host.models.registry import Extensions, LoadedModel, ModelVersion, Registry, VersionState

Values = Mapping[str, int]
Outputs = Values | HostError
"""What a model computes from the values of its inputs."""

MAX_OUTSTANDING = 4
"""Responses without an acknowledgement after which a decoupled model pauses."""

STEP_TIMES = ExecutionTimes(0, 1, 21, 321)
"""Of each execution: 1 ns for inputs, 20 ns for inference, 300 ns for outputs."""


def tensors(names: str) -> str:
    """The entries of `input` or `output`; `?` after a name marks an optional tensor."""
    return ", ".join(
        f'{{ name: "{name.rstrip("?")}" data_type: TYPE_INT8 dims: [ -1 ]'
        f" optional: {str(name.endswith('?')).lower()} }}"
        for name in names.split()
    ).replace(" optional: false", "")


def increment(values: Values) -> Outputs:
    """Output A is input X plus one."""
    return {"A": values["X"] + 1}


class InMemoryModel(DrainableModel, CallHolder):
    """A model that computes in the process of the test.

    `compute` returns the outputs of a request; `stream`, of a decoupled model, those of each of its
    responses. A model that is `paused` keeps its calls until `run_next`. `final_with_last`: whether
    the last response of a decoupled model is also the end of the request.
    """

    defines_is_ready = False
    ready = True
    observes_responses = False

    def __init__(
        self,
        name: str,
        compute: Callable[[Values], Outputs] = increment,
        *,
        stream: Callable[[Values], Iterable[Outputs]] | None = None,
        inputs: str = "X",
        outputs: str = "A",
        paused: bool = False,
        final_with_last: bool = False,
    ) -> None:
        super().__init__()
        self.name, self.version = name, 1
        self.labels: Mapping[str, Sequence[str]] = {}
        self.extensions: Extensions = {}
        self.config: ModelConfig = parse_pbtxt(
            f'name: "{name}" input [ {tensors(inputs)} ] output [ {tensors(outputs)} ]'
            f" model_transaction_policy {{ decoupled: {str(stream is not None).lower()} }}",
            "config.pbtxt",
        )
        counters = InferenceCounters(name, "1")
        self.metrics = ModelMetrics(self.config, 1, counters, lambda: 0, MetricsSettings())
        self.paused = paused
        self.started: list[Values] = []
        """The inputs of each request that it has started."""
        self.waiting: deque[Call] = deque()
        self.cancelled: list[Call] = []
        self.sent = 0
        """Responses of all streams so far."""
        self._signature = Signature(self.config)
        self._compute = compute
        self._stream = stream
        self._final_with_last = final_with_last

    @property
    def holds(self) -> int:
        """Number of requests of ensembles that hold the model."""
        return self._holds

    def infer(self, request: InferRequest) -> Call:
        """Starts a request. Raises HostError if it is invalid."""
        self._signature.validate_request(request)
        self._raise_if_draining(request)
        call = Call(request)
        self._track_call(call)
        call.holder = self
        self.started.append({t.name: read_bytes(t.data)[0] for t in request.inputs})
        self.waiting.append(call)
        if not self.paused:
            self.run_next()
        return call

    def run_next(self, index: int = 0) -> None:
        """Runs a request that waits."""
        call = self.waiting[index]
        del self.waiting[index]
        values = {t.name: read_bytes(t.data)[0] for t in call.request.inputs}
        if self._stream is not None:
            _Sender(self, call, self._stream(values), self._final_with_last).send()
            return
        try:
            answer = self._response(call, self._compute(values))
        except Exception:  # of any kind, raised again
            self._release_call(call)
            raise
        call.record_compute_times(STEP_TIMES)
        call.respond(answer)

    def _response(self, call: Call, outputs: Outputs) -> InferResponse:
        response = InferResponse(self.name, self.version, call.request.id)
        if isinstance(outputs, HostError):
            response.error = outputs
        else:
            response.outputs = [
                Tensor(name, "INT8", [1] if value >= 0 else [0], bytes([value] * (value >= 0)))
                for name, value in outputs.items()
            ]
        return response

    def cancel_call(self, call: Call) -> bool:
        """Withdraws a call; its responses are dropped."""
        self.cancelled.append(call)
        if call in self.waiting:
            self.waiting.remove(call)
        return False

    def call_finished(self, call: Call) -> None:
        """Releases the call."""
        self._release_call(call)

    async def why_not_ready(self) -> str:
        """It is ready."""
        return ""

    def abort(self, error: HostError) -> None:
        """Ends every call in progress."""
        for call in list(self._calls):
            call.abort(error)

    async def stop(self, grace: float, finalize: float) -> None:
        """Does nothing."""


class _Sender:
    """Sends the responses of one request of a decoupled model, a few without acknowledgement."""

    def __init__(
        self, model: InMemoryModel, call: Call, outputs: Iterable[Outputs], final_with_last: bool
    ) -> None:
        self._model = model
        self._call = call
        self._left = deque(outputs)
        self._final_with_last = final_with_last
        self._limit = call.request.max_outstanding_responses or MAX_OUTSTANDING
        self._outstanding = 0
        self._sending = False
        call.on_response_acknowledged = self._acknowledged

    def send(self) -> None:
        if self._sending:
            return
        self._sending = True
        while self._left and self._outstanding < self._limit and not self._call.ended:
            response = self._model._response(self._call, self._left.popleft())
            self._outstanding += 1
            self._model.sent += 1
            final = self._final_with_last and not self._left
            if final:
                self._call.record_compute_times(STEP_TIMES)
            self._call.respond(response, final)
        self._sending = False
        if not self._left and not self._call.ended:
            self._call.record_compute_times(STEP_TIMES)
            self._call.respond(None)

    def _acknowledged(self, response: InferResponse) -> None:
        self._outstanding -= 1
        self.send()


class Memory:
    """Memory for tensors of ensembles; `error` is raised for each tensor."""

    def __init__(self) -> None:
        self.moved: list[int] = []
        self.error: Exception | None = None

    def place_tensor(self, tensor: Tensor) -> None:
        """Records the tensor."""
        if self.error is not None:
            raise self.error
        self.moved.append(read_bytes(tensor.data)[0])


Step = tuple[InMemoryModel, Mapping[str, str], Mapping[str, str]]
"""A model, the ensemble's tensors that are its inputs, and those that its outputs become."""


class Caller:
    """One request to an ensemble, and its results. `reads`: acknowledges each response."""

    def __init__(self, ensemble: Ensemble, values: Values, reads: bool, **options: Any) -> None:
        inputs = [Tensor(name, "INT8", [1], bytes([value])) for name, value in values.items()]
        self.outputs: list[Values] = []
        self.parameters: list[Mapping[str, Any]] = []
        self.finals: list[bool] = []
        """Of each response and of an end without one, whether it was the last one."""
        self.error: HostError | None = None
        self.responses: list[InferResponse] = []
        self._reads = reads
        self.call = ensemble.infer(InferRequest(ensemble.name, inputs, **options))
        self.call.subscribe(self._answered)

    def _answered(self, response: InferResponse | None, final: bool) -> None:
        assert True not in self.finals, "a response after the last one"
        self.finals.append(final)
        if response is None:
            return
        if response.error is not None:
            self.error = response.error
            return
        self.responses.append(response)
        self.parameters.append(response.parameters)
        self.outputs.append(
            {t.name: read_bytes(t.data)[0] if len(t.data) else -1 for t in response.outputs}
        )
        if self._reads:
            self.call.acknowledge_response(response)


class Graph:
    """An ensemble of in-memory models with one INT8 in each tensor."""

    def __init__(
        self,
        *steps: Step,
        inputs: str = "I",
        outputs: str = "O",
        scheduling: str = "",
        ordered: bool = True,
    ) -> None:
        self.models = list({id(model): model for model, _, _ in steps}.values())
        registry = Registry()
        for one in self.models:
            model: LoadedModel = one
            registry.set_version(one.name, ModelVersion(1, VersionState.READY, model=model))
        parts = ", ".join(
            f'{{ model_name: "{model.name}" model_version: -1'
            f" {_pairs('input_map', given)} {_pairs('output_map', made)} }}"
            for model, given, made in steps
        )
        config = parse_pbtxt(
            f'name: "graph" platform: "ensemble" input [ {tensors(inputs)} ]'
            f" output [ {tensors(outputs)} ]"
            f" ensemble_scheduling {{ {scheduling} step [ {parts} ] }}"
            + ('parameters { key: "PRESERVE_ORDERING" value { string_value: "no" } }')
            * (not ordered),
            "config.pbtxt",
        )
        decoupled = check_step_models(config, [model.config for model, _, _ in steps])
        config.model_transaction_policy.decoupled = decoupled
        self.memory = Memory()
        self.ensemble = Ensemble(config, 1, registry, self.memory.place_tensor)

    def infer(self, *, reads: bool = True, **values: Any) -> Caller:
        """Sends a request with these inputs; lower-case names are options of the request."""
        inputs = {name: value for name, value in values.items() if name.isupper()}
        options = {name: value for name, value in values.items() if not name.isupper()}
        return Caller(self.ensemble, inputs, reads, **options)

    @property
    def idle(self) -> bool:
        """Whether no request is in progress, and none holds a model."""
        busy = self.ensemble.in_flight or any(m.in_flight or m.holds for m in self.models)
        return not busy


def _pairs(field: str, mapping: Mapping[str, str]) -> str:
    return " ".join(f'{field} {{ key: "{k}" value: "{v}" }}' for k, v in mapping.items())


def chain(*models: InMemoryModel, scheduling: str = "", ordered: bool = True) -> Graph:
    """Each model takes the output A of the one before it as its input X."""
    names = ["I", *(f"t{index}" for index in range(1, len(models))), "O"]
    steps: list[Step] = [
        (model, {"X": names[index]}, {"A": names[index + 1]}) for index, model in enumerate(models)
    ]
    return Graph(*steps, scheduling=scheduling, ordered=ordered)


def add(values: Values) -> Outputs:
    """Output A is the sum of all inputs."""
    return {"A": sum(values.values())}


def diamond(
    source: InMemoryModel,
    left: InMemoryModel,
    right: InMemoryModel,
    scheduling: str = "",
    ordered: bool = True,
) -> tuple[Graph, InMemoryModel]:
    """Two models take the output of `source`, a third one adds their outputs."""
    join = InMemoryModel("join", add, inputs="X Y")
    graph = Graph(
        (source, {"X": "I"}, {"A": "middle"}),
        (left, {"X": "middle"}, {"A": "left"}),
        (right, {"X": "middle"}, {"A": "right"}),
        (join, {"X": "left", "Y": "right"}, {"A": "O"}),
        scheduling=scheduling,
        ordered=ordered,
    )
    return graph, join
