"""A core in memory for tests of the gRPC endpoint: models that echo, hold, fail and repeat."""

from __future__ import annotations

import queue

from tritonclient.grpc import model_config_pb2

from host.core import Core
from host.errors import internal, invalid_argument, not_found, unavailable, unsupported
from host.health import Health
from host.inference.call import Call
from host.inference.metadata import (
    BatchStatistics,
    Duration,
    IndexEntry,
    InferenceStatistics,
    ModelMetadata,
    ModelStatistics,
    ServerMetadata,
    TensorMetadata,
)
from host.inference.request import InferRequest, InferResponse, Tensor
from host.instances.regions import Regions
from host.model_control.control import LoadParameters, ModelControl
from tests.unit.host.call_parties import RecordingHolder

MODELS = ("echo", "hold", "fail", "silent", "bug", "repeat")


def echo(request: InferRequest) -> InferResponse:
    """Inputs of the request as outputs, INPUT... called OUTPUT..., with its parameters."""
    outputs = [
        Tensor(tensor.name.replace("INPUT", "OUTPUT"), tensor.datatype, tensor.shape, tensor.data)
        for tensor in request.inputs
    ]
    return InferResponse(request.model_name, 1, request.id, outputs, dict(request.parameters))


def _look_up(name: str) -> None:
    if name not in MODELS:
        raise not_found(f"Request for unknown model: '{name}' is not found")


class EchoHealth(Health):
    """Health that the test sets."""

    def __init__(self) -> None:
        self.is_ready = True
        self.exiting = False

    def live(self) -> bool:
        if self.exiting:
            raise unavailable("Server exiting")
        return True

    async def ready(self) -> bool:
        return self.live() and self.is_ready

    async def model_ready(self, name: str, version: str) -> bool:
        _look_up(name)
        return version != "9"


class RecordingControl(ModelControl):
    """Remembers what was asked of it."""

    def __init__(self) -> None:
        self.loaded: list[tuple[str, LoadParameters]] = []
        self.unloaded: list[tuple[str, bool]] = []

    async def load_model(
        self,
        name: str,
        parameters: LoadParameters,
        *,
        requester: str | None = None,
        hooked: bool = True,
    ) -> None:
        self.loaded.append((name, parameters))

    async def unload_model(self, name: str, dependents: bool, *, hooked: bool = True) -> None:
        self.unloaded.append((name, dependents))


class EchoCore(Core):
    """Overrides what the endpoint asks of a `Core`.

    `held` and `cancelled` report to the thread of the test.

    `hold` answers when the test responds, `fail` with an error, `silent` never, `bug` raises.
    `repeat` is decoupled: its input, an INT32, says how often it answers before an empty final.
    """

    def __init__(self) -> None:
        self.regions = Regions(None)
        self.request_tracer = None
        self._remote = None
        self.collect_statistics = self._collect_statistics
        self.health: EchoHealth = EchoHealth()
        self.held: queue.Queue[Call] = queue.Queue()
        self.cancelled: queue.Queue[str] = queue.Queue()
        self.control: RecordingControl = RecordingControl()

    def infer(self, request: InferRequest, unary: bool = False) -> Call:
        _look_up(request.model_name)
        if request.model_name == "repeat" and unary:
            raise unsupported(
                "ModelInfer RPC doesn't support models with decoupled transaction policy"
            )
        if any(tensor.datatype == "FP64" for tensor in request.inputs):
            raise invalid_argument(f"[request id: {request.id}] no FP64 here")
        if request.model_name == "bug":
            raise RuntimeError("a bug in the core")
        call = Call(request)
        if request.model_name == "echo":
            call.respond(echo(request))
        elif request.model_name == "fail":
            call.fail(internal("the model said no"))
        elif request.model_name == "silent":
            call.respond(None)
        elif request.model_name == "repeat":
            for _ in range(int.from_bytes(request.inputs[0].data, "little")):
                call.respond(echo(request), final=False)
            call.respond(None)
        else:
            call.holder = RecordingHolder(
                on_cancel=lambda call: self.cancelled.put(call.request.id)
            )
            self.held.put(call)
        return call

    def server_metadata(self) -> ServerMetadata:
        return ServerMetadata("triton", "1.2.3", ["statistics", "parameters"])

    def model_metadata(self, name: str, version: str) -> ModelMetadata:
        _look_up(name)
        tensors = [TensorMetadata("INPUT0", "FP32", [-1, 16])]
        return ModelMetadata(name, ["1"], "python", tensors, tensors)

    def model_config(self, name: str, version: str) -> model_config_pb2.ModelConfig:
        _look_up(name)
        config = model_config_pb2.ModelConfig(name=name, backend="python")
        config.model_transaction_policy.decoupled = name == "repeat"
        return config

    def statistics(self, name: str, version: str) -> list[ModelStatistics]:
        once = Duration(1, 1000)
        return [
            ModelStatistics(
                name,
                "1",
                last_inference=5,
                inference_count=8,
                execution_count=1,
                inference_stats=InferenceStatistics(success=once),
                batch_stats=[BatchStatistics(8, compute_infer=once)],
            )
        ]

    async def repository_index(self, ready: bool) -> list[IndexEntry]:
        entries = [IndexEntry("echo", "1", "READY"), IndexEntry("new")]
        return entries[:1] if ready else entries
