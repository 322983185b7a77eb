"""The test harness: loads a model as a server does, sends it requests, and unloads it."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from pb_utils import _runtime
from pb_utils._bls import ResponseIterator, ResponseStream
from pb_utils._exceptions import TritonModelException
from pb_utils._model_code import call_preload, defines
from pb_utils._request import InferenceRequest
from pb_utils._response import InferenceResponse
from pb_utils.testing import _loading, _messages
from pb_utils.testing._harness_runtime import HarnessRuntime, LogRecord
from pb_utils.testing._instance import Instance
from pb_utils.testing._metric_samples import MetricSample
from pb_utils.testing._other_models import ModelControl, OtherModels

if TYPE_CHECKING:
    import numpy.typing as npt

    from pb_utils._tensor import Tensor
    from pb_utils.testing._other_models import StandIn

    Arrays = Mapping[str, npt.ArrayLike | Tensor]
    Responses = Union[InferenceResponse, Iterator[InferenceResponse]]
    Fake = Union[Callable[[InferenceRequest], Responses], Arrays, "ModelHarness"]
else:
    Fake = object
"""A stand-in for a model that the model under test calls.

It is a function of the request, constant outputs by name, or another harness. A generator function
stands for a decoupled model: it yields any number of responses, and is closed after a response once
the request is cancelled.
"""


def load(
    model: str | os.PathLike[str] | type[Any],
    config: Mapping[str, Any] | str | None = None,
    *,
    name: str | None = None,
    version: int | str | None = None,
    parameters: Mapping[str, str] | None = None,
    models: Mapping[str, Fake] | None = None,
    response_timeout: float = 60.0,
    backend: str | os.PathLike[str] | None = None,
    on_log: Callable[[LogRecord], None] | None = None,
) -> ModelHarness:
    """Imports a model, completes its configuration and initialises it.

    Args:
        model: the model's folder, which holds ``<version>/model.py``, or the model's class.
        config: the configuration as a dict or JSON text; by default that of ``config.pbtxt`` in the
            model's folder, if there is one, as a server reads it. If it has no inputs,
            ``auto_complete_config`` of the model completes it.
        name: name of the model; by default that of the configuration, of the folder or of the
            class.
        version: version to load; by default the one that clients of a server get, 1 for a class.
        parameters: the ``parameters`` of the configuration, as str by key.
        models: stand-ins for the models that the model calls (BLS), by model name.
        response_timeout: time limit in seconds for responses of this model and of stand-ins.
        backend: folder of the Python-based backend whose ``model.py`` runs the model.
        on_log: a function that gets each log message of the model when it is written.

    Returns:
        The loaded model.

    Raises:
        TritonModelException: there is no such model, version or file, or ``config.pbtxt`` is
            wrong.
        Exception: any exception of the model itself.

    Examples:
        >>> with testing.load("models/square") as model:
        ...     outputs = model.infer({"X": np.float32([3])})
    """
    if config is None and not isinstance(model, type) and (Path(model) / "config.pbtxt").is_file():
        described = _loading.read_folder(Path(model).resolve(), version, backend)
        config, version = described["config"], described["version"]
        backend = backend or described["backend"] or None
    given = json.loads(config) if isinstance(config, str) else dict(config or {})
    if parameters:
        string_parameters = {key: {"string_value": text} for key, text in parameters.items()}
        given["parameters"] = {**given.get("parameters", {}), **string_parameters}
    if isinstance(model, type):
        source = _loading.load_class(model, version)
        default_name = model.__name__
    else:
        folder = Path(model).resolve()
        filename = given.get("default_model_filename") or "model.py"
        from_backend = None if backend is None else Path(backend).resolve()
        source = _loading.load_folder(folder, version, filename, from_backend)
        default_name = folder.name
    full_config = _loading.normalized_config(given, name or given.get("name") or default_name)
    try:
        return ModelHarness(source, full_config, models or {}, response_timeout, on_log)
    except BaseException:  # BaseException, because Ctrl-C must remove the imported modules too
        source.unload()
        raise


class ModelHarness:
    """A loaded model. ``load`` returns it; the end of its ``with`` block finalises the model.

    Attributes:
        model: the instance of ``TritonPythonModel``.
        config: the complete configuration, as a dict.
        args: the arguments of ``initialize``, a dict of str to str.
        logs: the log messages of the model so far.
        control: the models that the model has loaded or unloaded so far.
    """

    def __init__(
        self,
        source: _loading.LoadedModel,
        config: dict[str, Any],
        models: Mapping[str, Fake],
        response_timeout: float,
        on_log: Callable[[LogRecord], None] | None = None,
    ) -> None:
        """Initialises the model. Use ``load`` instead."""
        self.logs: list[LogRecord] = []
        self.control: list[ModelControl] = []
        self._instance: Instance
        self._source = source
        self._response_timeout = response_timeout
        self._runtime = HarnessRuntime(
            source.directory / source.version,
            _loading.instance_name(config),
            OtherModels(models, _to_stand_in, self.control),
            self.logs,
            response_timeout,
            on_log,
        )
        try:
            with _runtime.use(self._runtime, persistent=True):
                call_preload(
                    source.model_class,
                    _loading.initialize_arguments(config, source.directory, source.version),
                )
                if not config["input"] and hasattr(source.model_class, "auto_complete_config"):
                    config = _loading.auto_completed_config(source.model_class, config)
                self.config: dict[str, Any] = config
                self.args: dict[str, str] = _loading.initialize_arguments(
                    config, source.directory, source.version
                )
                self.model: Any = source.model_class()
                if defines(self.model, "initialize"):
                    self.model.initialize(dict(self.args))
        except BaseException:  # BaseException, because Ctrl-C must stop the use of the runtime too
            _runtime.stop_using(self._runtime)
            raise
        name = self.args["model_instance_name"]
        self._instance = Instance(
            self.model, config, source.file, name, self._runtime, response_timeout
        )
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
        """Creates a request as a client sends it, for ``execute``, ``run`` or ``submit``.

        Args:
            inputs: arrays or tensors by input name, with the batch dimension if the model has one.
                Arrays of str become BYTES.
            request_id: the request id.
            correlation_id: id of the sequence.
            flags: sequence flags.
            timeout: timeout in microseconds.
            parameters: custom parameters.
            requested_outputs: names of the requested outputs; all outputs if empty.
            cancelled: whether the client has cancelled the request.

        Returns:
            The request.

        Raises:
            TypeError: as for ``InferenceRequest``.
            TritonModelException: as for ``InferenceRequest``.
        """
        request = InferenceRequest(
            request_id=request_id,
            correlation_id=correlation_id,
            inputs=_messages.as_tensors(inputs),
            requested_output_names=requested_outputs,
            model_name=self.args["model_name"],
            model_version=int(self.args["model_version"]),
            flags=flags,
            timeout=timeout,
            parameters=parameters,
        )
        cancelled_event = threading.Event()
        if cancelled:
            cancelled_event.set()
        decoupled = self._instance.decoupled
        request._handle = _messages.PendingRequest(
            decoupled, _messages.discard_response, cancelled_event, requested_outputs
        )
        return request

    def infer(
        self,
        inputs: Arrays,
        *,
        request_id: str = "",
        parameters: dict[str, bool | int | str] | None = None,
        requested_outputs: Sequence[str] = (),
    ) -> dict[str, npt.NDArray[Any]]:
        """Sends one request, and returns its outputs by name.

        Args:
            inputs: as for ``request``.
            request_id: as for ``request``.
            parameters: as for ``request``.
            requested_outputs: as for ``request``.

        Returns:
            Arrays in the shapes and data types of the response. BYTES outputs are object arrays of
            ``bytes``, BF16 outputs are arrays of ``ml_dtypes.bfloat16``.

        Raises:
            TritonModelException: the response is an error, or a server would reject what
                ``execute`` returned.
            Exception: any exception of ``execute``.
        """
        request = self.request(
            inputs,
            request_id=request_id,
            parameters=parameters,
            requested_outputs=requested_outputs,
        )
        return _messages.as_arrays(self.execute([request])[0])

    def execute(self, requests: Sequence[InferenceRequest]) -> list[InferenceResponse]:
        """Sends one batch of requests, and returns their responses as clients would get them.

        ``execute`` runs in the current thread. If it does not return a response, the method waits
        for the one that the response sender sends.

        Args:
            requests: the requests, each created by ``request``.

        Returns:
            One response for each request.

        Raises:
            TritonModelException: a server would reject what ``execute`` returned, a request got no
                response within ``response_timeout``, or the model is decoupled. Requests that are
                open then are cancelled.
            Exception: any exception of ``execute``.
        """
        self._check_open()
        if self._instance.decoupled:
            raise TritonModelException(
                f"Model '{self.args['model_name']}' is decoupled and may send any number of "
                "responses: use stream() or submit()."
            )
        streams = [ResponseStream() for _ in requests]
        self._instance.run_batch(
            requests, [_messages.stream_receiver(stream) for stream in streams]
        )
        for request, stream in zip(requests, streams):
            stream.set_cancel_callback(_messages.cancelled_event(request).set)
        responses: list[InferenceResponse] = []
        for stream in streams:
            timeout_error = stream.set_timeout(self._response_timeout, self._timeout_error())
            response = stream.next_response()
            assert response is not None
            if response is timeout_error or isinstance(response, _messages.NoResponse):
                for open_stream in streams:
                    open_stream.cancel_request()
                raise TritonModelException(_messages.error_text(response))
            responses.append(response)
        return responses

    def run(self, request: InferenceRequest, receive: Callable[[InferenceResponse], None]) -> None:
        """Sends one request, and waits for its last response. The model may be decoupled.

        ``execute`` runs in the current thread, so debuggers and profilers can follow it.

        Args:
            request: the request, created by ``request``.
            receive: a function that gets each response, in the thread that sends it, until the
                method ends.

        Raises:
            TritonModelException: a server would reject what ``execute`` returned, or the last
                response does not arrive within ``response_timeout``; the request is then cancelled.
            Exception: any exception of ``execute``.
        """
        self._check_open()
        stream = ResponseStream()
        add_to_stream = _messages.stream_receiver(stream)
        timed_out = False

        def receive_and_add(response: InferenceResponse | None, final: bool) -> None:
            if response is not None and not timed_out:
                receive(response)
            add_to_stream(response, final)

        self._instance.run_batch([request], [receive_and_add])
        timeout_error = stream.set_timeout(self._response_timeout, self._timeout_error())
        while (response := stream.next_response()) is not None:
            if response is timeout_error:
                timed_out = True  # first: a cancelled model may answer at once
                _messages.cancelled_event(request).set()
                raise TritonModelException(self._timeout_error())

    def submit(self, requests: Sequence[InferenceRequest]) -> list[ResponseIterator]:
        """Sends one batch of requests without waiting for responses.

        ``execute`` runs in a thread of the harness. An exception of ``execute`` is logged and
        becomes an error response of each request. A request that is not complete within
        ``response_timeout`` ends with an error, UNAVAILABLE.

        Args:
            requests: the requests, each created by ``request``.

        Returns:
            An iterator over the responses for each request. Its ``cancel()``, or deleting it,
            cancels the request.

        Raises:
            TritonModelException: the model has been finalized.
        """
        self._check_open()
        streams: list[ResponseStream] = []
        for request in requests:
            stream = ResponseStream()
            stream.set_cancel_callback(_messages.cancelled_event(request).set)
            stream.set_timeout(self._response_timeout, self._timeout_error())
            streams.append(stream)
        self._instance.submit_batch(
            requests, [_messages.stream_receiver(stream) for stream in streams]
        )
        return [ResponseIterator._from_stream(stream) for stream in streams]

    def stream(
        self,
        inputs: Arrays,
        *,
        request_id: str = "",
        parameters: dict[str, bool | int | str] | None = None,
        requested_outputs: Sequence[str] = (),
    ) -> Iterator[dict[str, npt.NDArray[Any]]]:
        """Sends one request without waiting, and returns an iterator over its responses.

        Args:
            inputs: as for ``request``.
            request_id: as for ``request``.
            parameters: as for ``request``.
            requested_outputs: as for ``request``.

        Returns:
            An iterator over the outputs of each response, in the form of ``infer``. It raises
            TritonModelException for an error response.

        Raises:
            TritonModelException: the model has been finalized.
        """
        request = self.request(
            inputs,
            request_id=request_id,
            parameters=parameters,
            requested_outputs=requested_outputs,
        )
        (responses,) = self.submit([request])
        return (_messages.as_arrays(response) for response in responses)

    def is_ready(self) -> bool:
        """Returns the result of the model's ``is_ready``; True if it does not define it.

        Raises:
            TritonModelException: the result is not a bool; for a server, the model is then not
                ready.
            Exception: any exception of ``is_ready``; for a server, the model is then not ready.
        """
        self._check_open()
        return self._instance.is_ready()

    def sequences_expired(self, correlation_ids: Sequence[int | str]) -> None:
        """Calls the model's ``sequences_expired``, as a server does; nothing if it defines none.

        Args:
            correlation_ids: the ids of sequences that have ended without a request with END.

        Raises:
            TritonModelException: the model has been finalized.
            Exception: any exception of ``sequences_expired``, which a server logs.
        """
        self._check_open()
        self._instance.report_expired_sequences(correlation_ids)

    def metrics(self) -> list[MetricSample]:
        """Returns the custom metrics of the model that a scrape would show now."""
        return self._runtime.metrics.samples()

    def metric(self, family: str, labels: Mapping[str, str] | None = None) -> MetricSample:
        """Returns the custom metric of the model with this family name and exactly these labels.

        Args:
            family: name of the metric family.
            labels: the labels, a dict of str to str; None for no labels.

        Raises:
            TritonModelException: the model has no such metric.
        """
        return self._runtime.metrics.sample(family, labels or {})

    def close(self) -> None:
        """Waits for running batches, finalises the model and removes its modules.

        Later calls do nothing.

        Raises:
            TritonModelException: a batch still runs after ``response_timeout``, at least 5 seconds.
            Exception: any exception of ``finalize``.
        """
        if self._instance.closed:
            return
        self._instance.closed = True
        try:
            self._instance.close()
            self._runtime.bls_allowed = False
            if defines(self.model, "finalize"):
                with _runtime.use(self._runtime, persistent=True):
                    self.model.finalize()
        finally:
            self._runtime.bls_allowed = False
            _runtime.stop_using(self._runtime)
            self._source.unload()

    def __enter__(self) -> ModelHarness:
        """Returns the harness itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Closes the harness."""
        self.close()

    def _check_open(self) -> None:
        if self._instance.closed:
            raise TritonModelException("The model has been finalized.")

    def _timeout_error(self) -> str:
        return (
            f"Model '{self.args['model_name']}' did not complete its responses within the "
            f"response_timeout of {self._response_timeout:g} seconds."
        )


def _to_stand_in(model: Fake) -> StandIn:
    """Returns a stand-in: for a harness its instance, others as they are."""
    return model._instance if isinstance(model, ModelHarness) else model
