"""What every door may ask: inference, health, descriptions, model control."""

from __future__ import annotations

from collections.abc import Mapping

from host.config.model_config import ModelConfig
from host.descriptions import (
    IndexEntry,
    ModelMetadata,
    ModelStatistics,
    ServerMetadata,
    TensorMetadata,
)
from host.errors import HostError, internal, invalid_argument, unavailable, unsupported
from host.inference import Call, InferRequest, Parameter
from host.models.lifecycle import Lifecycle
from host.models.registry import UNLOADED, Model, Registry, State, Version, parse_version
from host.models.wait_graph import is_stuck

VERSION = "2.73.0"
"""Version of Triton whose behaviour is followed; clients may look at it."""

EXTENSIONS = ["model_repository", "statistics"]
"""Protocol extensions that are served."""


class Core:
    """One server's models, seen from outside. Belongs to the event loop."""

    def __init__(self, name: str, registry: Registry, strict_readiness: bool) -> None:
        self._name = name
        self._registry = registry
        self._strict = strict_readiness
        self._lifecycle: Lifecycle | None = None
        self._started = False
        self._exiting = False

    def connect(self, lifecycle: Lifecycle) -> None:
        """The lifecycle is there (it needs the core for BLS, so it comes second)."""
        self._lifecycle = lifecycle

    def start(self) -> None:
        """Start-up is over: requests are served."""
        self._started = True

    def begin_exit(self) -> None:
        """From now on the server says that it is leaving."""
        self._exiting = True

    # Inference

    def infer(self, request: InferRequest, unary: bool = False) -> Call:
        """Start a request. `unary` doors cannot carry a decoupled model's responses.

        Raises HostError at once if the model is not there or the request not valid for it.
        """
        if not self._started:
            raise unavailable("Server not ready")
        model = self._registry.find(request.model_name, request.model_version)
        if unary and model.config.model_transaction_policy.decoupled:
            raise unsupported(
                "ModelInfer RPC doesn't support models with decoupled transaction policy"
            )
        return model.infer(request)

    def ask(self, request: InferRequest) -> Call:
        """Start a request of a model (BLS). Raises HostError (pb_utils spec 5.3)."""
        name = request.model_name
        try:
            if not self._started:
                raise unavailable("Server not ready")
            model = self._registry.find(name, request.model_version)
            if not model.ready:
                raise internal(
                    f"Failed for execute the inference request. Model '{name}' is not ready."
                )
            return model.infer(request)
        except HostError as error:
            raise internal(
                f"Model {name} - Error when running inference: {error.message}"
            ) from error

    def break_circle(self, call: Call) -> None:
        """Fail a BLS call that could only go on after itself."""
        if not is_stuck(call):
            return
        name = call.request.model_name
        call.abandon(
            internal(
                f"Model {name} - Error when running inference: the request waits for itself: every"
                f" instance of model '{name}' is busy with a request that waits for this one."
                f" Raise the instance_group count of '{name}', or do not call it from a model"
                " that it calls"
            )
        )

    # Health

    def live(self) -> bool:
        """Whether the server answers. Raises HostError while it exits."""
        self._refuse_exiting()
        return True

    def ready(self) -> bool:
        """Whether every model can be asked; with lax readiness, whether the server is up.

        Raises HostError while it exits.
        """
        self._refuse_exiting()
        if not self._started:
            return False
        return not self._strict or all(
            entry.versions and not entry.reason and all(map(_is_fine, entry.versions.values()))
            for _, entry in self._registry.items()
        )

    def model_ready(self, name: str, version: str) -> bool:
        """Whether this model can be asked. Raises HostError if it is not known."""
        self._refuse_exiting()
        number = parse_version(version)
        versions = self._registry.versions(name)
        if not versions or (number != -1 and number not in versions):
            self._registry.find(name, number)  # says what is not known
        return any(
            known.state is State.READY and known.model is not None and known.model.ready
            for known in versions.values()
            if number in (-1, known.number)
        )

    def _refuse_exiting(self) -> None:
        if self._exiting:
            raise unavailable("Server exiting")

    # Descriptions

    def server_metadata(self) -> ServerMetadata:
        """Who this is."""
        return ServerMetadata(self._name, VERSION, list(EXTENSIONS))

    def model_metadata(self, name: str, version: str) -> ModelMetadata:
        """What a model takes and gives. Raises HostError if it is not there."""
        model = self._find(name, version)
        versions = (
            [model.version]
            if version
            else [n for n, v in self._registry.versions(name).items() if v.state is State.READY]
        )
        config = model.config
        return ModelMetadata(
            name=name,
            versions=[str(number) for number in versions],
            platform=config.platform or config.backend,
            inputs=_tensors(config, config.input),
            outputs=_tensors(config, config.output),
        )

    def model_config(self, name: str, version: str) -> ModelConfig:
        """The complete configuration. Raises HostError if the model is not there."""
        return self._find(name, version).config

    def statistics(self, name: str, version: str) -> list[ModelStatistics]:
        """What models have done; all of them without a name. Raises HostError."""
        if not self._started:
            raise unavailable("Server not ready")
        number = parse_version(version)
        found = [
            known.model.statistics()
            for model_name, entry in self._registry.items()
            for known in sorted(entry.versions.values(), key=lambda v: v.number)
            if name in ("", model_name)
            and number in (-1, known.number)
            and known.state is State.READY
            and known.model is not None
        ]
        if name and not found:
            if number != -1 and self._registry.versions(name):
                raise invalid_argument(
                    f"requested model version is not available for model '{name}'"
                )
            raise invalid_argument(f"requested model '{name}' is not available")
        return found

    def _find(self, name: str, version: str) -> Model:
        return self._registry.find(name, parse_version(version))

    # Model control

    def repository_index(self, ready: bool) -> list[IndexEntry]:
        """Every model on disk with its versions; only the ready ones if asked so."""
        assert self._lifecycle is not None
        entries: list[IndexEntry] = []
        for name in self._lifecycle.names_on_disk():
            versions = self._registry.versions(name)
            if not versions and not ready:
                entries.append(IndexEntry(name))
            entries += [
                IndexEntry(name, str(v.number), v.state.value, v.reason)
                for v in versions.values()
                if not ready or v.state is State.READY
            ]
        return entries

    async def load_model(self, name: str, parameters: Mapping[str, Parameter | bytes]) -> None:
        """Load or reload a model. Raises HostError (configuration spec 8.6)."""
        assert self._lifecycle is not None
        await self._lifecycle.load_explicit(name, parameters)

    async def unload_model(self, name: str, unload_dependents: bool) -> None:
        """Begin to unload a model. Raises HostError (configuration spec 8.7)."""
        assert self._lifecycle is not None
        await self._lifecycle.unload_explicit(name)


def _is_fine(version: Version) -> bool:
    """Whether a version does not keep a strict server from being ready."""
    if version.state is State.READY:
        return version.model is not None and version.model.ready
    return version.state is State.UNAVAILABLE and version.reason == UNLOADED


def _tensors(config: ModelConfig, tensors: object) -> list[TensorMetadata]:
    from tritonclient.grpc import model_config_pb2

    batch = [-1] if config.max_batch_size > 0 else []
    names = model_config_pb2.DataType
    return [
        TensorMetadata(
            tensor.name,
            "BYTES"
            if tensor.data_type == names.TYPE_STRING
            else names.Name(tensor.data_type)[len("TYPE_") :],
            batch + list(tensor.dims),
        )
        for tensor in tensors  # type: ignore[attr-defined]
    ]
