"""A model held in a test: loaded like by a server, called with arrays, unloaded at the end."""

from __future__ import annotations

import contextvars
import inspect
import json
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Union

from pb_utils import _runtime
from pb_utils._logger import Logger
from pb_utils._model_exception import TritonModelException
from pb_utils._request import InferenceRequest
from pb_utils._response import InferenceResponse
from pb_utils.testing import _exchange, _loading

if TYPE_CHECKING:
    import numpy.typing as npt

    from pb_utils._tensor import Tensor

    Arrays = Mapping[str, npt.ArrayLike | Tensor]
    Fake = Union[Callable[[InferenceRequest], InferenceResponse], Arrays, "ModelHarness"]
else:
    Fake = object
"""Answers the requests of a model under test: a function, constant outputs, or another model."""


class LogRecord(NamedTuple):
    """A message that the model wrote by ``Logger``."""

    level: Logger.LogLevel
    message: str
    filename: str
    line: int


def load(
    model: str | os.PathLike[str] | type[Any],
    config: Mapping[str, Any] | str | None = None,
    *,
    name: str | None = None,
    version: int | str | None = None,
    parameters: Mapping[str, str] | None = None,
    models: Mapping[str, Fake] | None = None,
) -> ModelHarness:
    """Import, complete and initialise a model.

    Args:
        model: the model's folder, ``<folder>/<version>/model.py``, or its class.
        config: its configuration as dict or JSON text. ``config.pbtxt`` is not read. Without
            inputs in it, the model's ``auto_complete_config`` is asked.
        name: the model's name; by default the configuration's, else the folder's or class's.
        version: version folder, by default the highest; 1 for a class.
        parameters: the configuration's ``parameters``, by key.
        models: who answers the requests that the model makes (BLS), by model name.

    Raises:
        TritonModelException: there is no such model, or it is decoupled.
        Exception: whatever the model itself raises.
    """
    given = json.loads(config) if isinstance(config, str) else dict(config or {})
    if parameters:
        texts = {key: {"string_value": text} for key, text in parameters.items()}
        given["parameters"] = {**given.get("parameters", {}), **texts}
    if isinstance(model, type):
        source = _loading.from_class(model, version)
        default_name = model.__name__
    else:
        folder = Path(model).resolve()
        filename = given.get("default_model_filename") or "model.py"
        source = _loading.from_folder(folder, version, filename)
        default_name = folder.name
    full = _loading.full_config(given, name or given.get("name") or default_name)
    try:
        return ModelHarness(source, full, models or {})
    except BaseException:
        source.forget()
        raise


class ModelHarness:
    """A loaded model. Made by ``load``; leaving its ``with`` block finalises the model.

    Attributes:
        model: the instance of ``TritonPythonModel``.
        config: the complete configuration, parsed.
        args: what ``initialize`` was given.
        logs: what the model has logged so far.
    """

    def __init__(
        self,
        source: _loading.Source,
        config: dict[str, Any],
        models: Mapping[str, Fake],
    ) -> None:
        """Initialise the model; ``load`` is the way to get here."""
        self.logs: list[LogRecord] = []
        self._source = source
        self._closed = False
        self._runtime = _HarnessRuntime(source, models, self.logs)
        with _runtime.use(self._runtime):
            if not config["input"] and hasattr(source.model_class, "auto_complete_config"):
                config = _loading.completed_config(source.model_class, config)
            self.config: dict[str, Any] = config
            self.args: dict[str, str] = _loading.arguments(config, source.directory, source.version)
            self.model: Any = source.model_class()
            if hasattr(self.model, "initialize"):
                self.model.initialize(dict(self.args))
        self._runtime.bls_allowed = True

    def request(
        self,
        inputs: Arrays,
        *,
        request_id: str = "",
        correlation_id: int | str = 0,
        flags: int = 0,
        timeout: int = 0,
        parameters: dict[str, bool | int | str] | None = None,
        requested_outputs: Sequence[str] = (),
        cancelled: bool = False,
    ) -> InferenceRequest:
        """Return a request of a client, to be passed to ``execute``.

        Args:
            inputs: arrays or tensors by input name, of the shapes that the model gets, that is
                with the batch dimension if it has one. Arrays of text become BYTES.
            request_id: the client's id for it.
            correlation_id: the sequence it belongs to.
            flags: sequence flags.
            timeout: in microseconds.
            parameters: custom parameters.
            requested_outputs: the outputs wanted; all if empty.
            cancelled: whether the client has cancelled it.

        Raises:
            TypeError, TritonModelException: as for ``InferenceRequest``.
        """
        request = InferenceRequest(
            request_id=request_id,
            correlation_id=correlation_id,
            inputs=_exchange.as_tensors(inputs),
            requested_output_names=requested_outputs,
            model_name=self.args["model_name"],
            model_version=int(self.args["model_version"]),
            flags=flags,
            timeout=timeout,
            parameters=parameters,
        )
        request._handle = _exchange.Incoming(cancelled)
        return request

    def infer(
        self,
        inputs: Arrays,
        *,
        request_id: str = "",
        parameters: dict[str, bool | int | str] | None = None,
        requested_outputs: Sequence[str] = (),
    ) -> dict[str, npt.NDArray[Any]]:
        """Send one request and return its outputs by name; the arguments are ``request``'s.

        Returns:
            Arrays of the shapes and types that the model gave; BYTES are object arrays of
            ``bytes``, BF16 are arrays of ``ml_dtypes.bfloat16``.

        Raises:
            TritonModelException: the response carries an error, or ``execute`` returned something
                that a server refuses.
            Exception: whatever ``execute`` raises.
        """
        request = self.request(
            inputs,
            request_id=request_id,
            parameters=parameters,
            requested_outputs=requested_outputs,
        )
        return _exchange.as_arrays(self.execute([request])[0])

    def execute(self, requests: Sequence[InferenceRequest]) -> list[InferenceResponse]:
        """Send one batch of requests and return the responses, as a client would get them.

        Raises:
            TritonModelException: what ``execute`` returned is refused by a server.
            Exception: whatever ``execute`` raises.
        """
        if self._closed:
            raise TritonModelException("The model has been finalized.")
        outputs = [output["name"] for output in self.config["output"]]
        batch = [_exchange.incoming(request, outputs) for request in requests]
        if not hasattr(self.model, "execute"):
            raise TritonModelException(
                f"Python model {self._source.file} does not implement `execute` method."
            )
        with _runtime.use(self._runtime):
            returned = self.model.execute(list(batch))
            if inspect.iscoroutine(returned):
                returned = _run_in_thread(returned)
        responses = _exchange.checked(returned, batch)
        return [
            _exchange.answered(response, request) for response, request in zip(responses, batch)
        ]

    def close(self) -> None:
        """Finalise the model and forget its modules. Does nothing the second time.

        Raises:
            Exception: whatever ``finalize`` raises.
        """
        if self._closed:
            return
        self._closed = True
        self._runtime.bls_allowed = False
        try:
            if hasattr(self.model, "finalize"):
                with _runtime.use(self._runtime):
                    self.model.finalize()
        finally:
            self._source.forget()

    def __enter__(self) -> ModelHarness:
        """Return the harness itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()


class _HarnessRuntime:
    """Answers the model's calls of the API from what the test has given."""

    def __init__(
        self, source: _loading.Source, models: Mapping[str, Fake], logs: list[LogRecord]
    ) -> None:
        self._model_dir = source.directory / source.version
        self._models = models
        self._logs = logs
        self.bls_allowed = False

    def log(self, level: int, filename: str, line: int, message: str) -> None:
        self._logs.append(LogRecord(Logger.LogLevel(level), message, filename, line))

    def model_dir(self) -> str:
        return str(self._model_dir)

    def is_cancelled(self, request: InferenceRequest) -> bool:
        return isinstance(request._handle, _exchange.Incoming) and request._handle.cancelled

    def exec(self, request: InferenceRequest) -> InferenceResponse:
        if not self.bls_allowed:
            raise TritonModelException("BLS is only supported during the 'execute' function.")
        name = request._model_name
        if name not in self._models:
            return _exchange.failed(
                f"Model {name} - Error when running inference: Request for unknown model: "
                f"'{name}' is not found"
            )
        received = _exchange.incoming(request, ())
        return _exchange.answered(_answer(self._models[name], received), received)


def _answer(model: Fake, request: InferenceRequest) -> InferenceResponse:
    if isinstance(model, ModelHarness):
        try:
            return model.execute([request])[0]
        except Exception as error:
            instance = model.args["model_instance_name"]
            return _exchange.failed(
                f"Failed to process the request(s) for model '{instance}', message: "
                f"{type(error).__name__}: {error}"
            )
    if isinstance(model, Mapping):
        return InferenceResponse(_exchange.as_tensors(model))
    try:
        return model(request)
    except TritonModelException as error:
        return _exchange.failed(str(error))


def _run_in_thread(coroutine: Coroutine[Any, Any, object]) -> object:
    """Run a coroutine on a loop of its own thread, as a stub does; the test may have a loop."""
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    context = contextvars.copy_context()
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(context.run, asyncio.run, coroutine).result()
