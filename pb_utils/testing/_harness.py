"""A model held in a test: loaded like by a server, called with arrays, unloaded at the end."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Union

from pb_utils import _runtime
from pb_utils._iterator import ResponseIterator
from pb_utils._model_exception import TritonModelException
from pb_utils._request import InferenceRequest
from pb_utils._response import InferenceResponse
from pb_utils._stream import ResponseStream
from pb_utils.testing import _loading, _messages
from pb_utils.testing._instance import Instance
from pb_utils.testing._metrics import MetricSample
from pb_utils.testing._other_models import ModelControl, OtherModels
from pb_utils.testing._runtime import HarnessRuntime, LogRecord

if TYPE_CHECKING:
    import numpy.typing as npt

    from pb_utils._tensor import Tensor

    Arrays = Mapping[str, npt.ArrayLike | Tensor]
    Responses = Union[InferenceResponse, Iterator[InferenceResponse]]
    Fake = Union[Callable[[InferenceRequest], Responses], Arrays, "ModelHarness"]
else:
    Fake = object
"""Answers the requests of a model under test: a function, constant outputs, or another model.

A generator function stands for a decoupled model: it yields any number of responses. It is left
at the next ``yield`` once the request is cancelled.
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
    """Import, complete and initialise a model.

    Args:
        model: the model's folder, ``<folder>/<version>/model.py``, or its class.
        config: its configuration as dict or JSON text. ``config.pbtxt`` is not read. Without
            inputs in it, the model's ``auto_complete_config`` is asked.
        name: the model's name; by default the configuration's, else the folder's or class's.
        version: version folder, by default the highest; 1 for a class.
        parameters: the configuration's ``parameters``, by key.
        models: who answers the requests that the model makes (BLS), by model name.
        response_timeout: seconds that the model, and those that it asks, may take for what the
            test waits for.
        backend: the folder of the Python-based backend whose ``model.py`` runs the model; the
            model's own folder then holds only its data.
        on_log: is called with each message that the model logs, as it comes.

    Raises:
        TritonModelException: there is no such model.
        Exception: whatever the model itself raises.
    """
    given = json.loads(config) if isinstance(config, str) else dict(config or {})
    if parameters:
        texts = {key: {"string_value": text} for key, text in parameters.items()}
        given["parameters"] = {**given.get("parameters", {}), **texts}
    if isinstance(model, type):
        source = _loading.load_class(model, version)
        default_name = model.__name__
    else:
        folder = Path(model).resolve()
        if backend is None:
            filename = given.get("default_model_filename") or "model.py"
            source = _loading.load_folder(folder, version, filename)
        else:
            source = _loading.load_backend(Path(backend).resolve(), folder, version)
        default_name = folder.name
    full = _loading.full_config(given, name or given.get("name") or default_name)
    try:
        return ModelHarness(source, full, models or {}, response_timeout, on_log)
    except BaseException:  # Ctrl-C, too: nobody else would forget its modules
        source.unload()
        raise


class ModelHarness:
    """A loaded model. Made by ``load``; leaving its ``with`` block finalises the model.

    Attributes:
        model: the instance of ``TritonPythonModel``.
        config: the complete configuration, parsed.
        args: what ``initialize`` was given.
        logs: what the model has logged so far.
        control: what it has loaded and unloaded so far.
    """

    def __init__(
        self,
        source: _loading.LoadedModel,
        config: dict[str, Any],
        models: Mapping[str, Fake],
        response_timeout: float,
        on_log: Callable[[LogRecord], None] | None = None,
    ) -> None:
        """Initialise the model; ``load`` is the way to get here."""
        self.logs: list[LogRecord] = []
        self.control: list[ModelControl] = []
        self._instance: Instance
        self._source = source
        self._response_timeout = response_timeout
        others = {
            name: model._instance if isinstance(model, ModelHarness) else model
            for name, model in models.items()
        }
        self._runtime = HarnessRuntime(
            source.directory / source.version,
            _loading.instance_name(config),
            OtherModels(others, self.control),
            self.logs,
            response_timeout,
            on_log,
        )
        try:
            with _runtime.use(self._runtime, lasting=True):
                if not config["input"] and hasattr(source.model_class, "auto_complete_config"):
                    config = _loading.completed_config(source.model_class, config)
                self.config: dict[str, Any] = config
                self.args: dict[str, str] = _loading.initialize_arguments(
                    config, source.directory, source.version
                )
                self.model: Any = source.model_class()
                if hasattr(self.model, "initialize"):
                    self.model.initialize(dict(self.args))
        except BaseException:  # Ctrl-C, too: nobody else would forget it
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
        """Return a request of a client, to be passed to ``execute`` or ``submit``.

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
            inputs=_messages.as_tensors(inputs),
            requested_output_names=requested_outputs,
            model_name=self.args["model_name"],
            model_version=int(self.args["model_version"]),
            flags=flags,
            timeout=timeout,
            parameters=parameters,
        )
        gone = threading.Event()
        if cancelled:
            gone.set()
        decoupled = self._instance.decoupled
        request._handle = _messages.PendingRequest(
            decoupled, _messages.discard_response, gone, requested_outputs
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
        return _messages.as_arrays(self.execute([request])[0])

    def execute(self, requests: Sequence[InferenceRequest]) -> list[InferenceResponse]:
        """Send one batch of requests and return the responses, as a client would get them.

        ``execute`` runs in this thread. A response that is not returned may come later, by the
        request's sender.

        Raises:
            TritonModelException: what ``execute`` returned is refused by a server, a request is
                left without an answer, or the model is decoupled.
            Exception: whatever ``execute`` raises.
        """
        self._check_open()
        if self._instance.decoupled:
            raise TritonModelException(
                f"Model '{self.args['model_name']}' is decoupled, so that it may give any number "
                "of responses: use stream() or submit()."
            )
        streams = [ResponseStream() for _ in requests]
        self._instance.run_batch(requests, [_messages.receiver_of(stream) for stream in streams])
        responses: list[InferenceResponse] = []
        for stream in streams:
            late = stream.set_timeout(self._response_timeout, self._timeout_error())
            response = stream.next_response()
            assert response is not None
            if response is late or isinstance(response, _messages.NoResponse):
                raise TritonModelException(_messages.error_text(response))
            responses.append(response)
        return responses

    def run(self, request: InferenceRequest, receive: Callable[[InferenceResponse], None]) -> None:
        """Send one request, and return when the last response to it has come.

        ``execute`` runs in this thread, also if the model is decoupled, so that a debugger and a
        profiler have it before them. ``receive`` is called with each response as it comes, in the
        thread that brings it.

        Raises:
            TritonModelException: what ``execute`` returned is refused by a server.
            Exception: whatever ``execute`` raises.
        """
        self._check_open()
        stream = ResponseStream()
        put = _messages.receiver_of(stream)

        def tell(response: InferenceResponse | None, final: bool) -> None:
            if response is not None:
                receive(response)
            put(response, final)

        self._instance.run_batch([request], [tell])
        while stream.next_response() is not None:
            pass

    def submit(self, requests: Sequence[InferenceRequest]) -> list[ResponseIterator]:
        """Send one batch of requests and do not wait; return an iterator for each of them.

        ``execute`` runs in a thread of the model's, and may answer any number of times if the
        model is decoupled. What it raises becomes error responses, and is logged. ``cancel()`` of
        an iterator, or dropping it, cancels its request. What does not end in time ends with an
        error, UNAVAILABLE.

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
        self._instance.submit_batch(requests, [_messages.receiver_of(stream) for stream in streams])
        return [ResponseIterator._from_stream(stream) for stream in streams]

    def stream(
        self,
        inputs: Arrays,
        *,
        request_id: str = "",
        parameters: dict[str, bool | int | str] | None = None,
        requested_outputs: Sequence[str] = (),
    ) -> Iterator[dict[str, npt.NDArray[Any]]]:
        """Send one request and return an iterator over its responses, each as by ``infer``.

        It is sent by ``submit``, and the arguments are ``request``'s. The iterator raises
        TritonModelException for a response with an error.

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
        """Return what the model's ``is_ready`` says; True if it has none.

        Raises:
            TritonModelException: it returns no bool, which a server takes for "not ready".
            Exception: whatever it raises, which a server takes for "not ready".
        """
        self._check_open()
        return self._instance.is_ready()

    def metrics(self) -> list[MetricSample]:
        """Return the model's metrics that a scrape would show now."""
        return self._runtime.metrics.samples()

    def metric(self, family: str, labels: Mapping[str, str] | None = None) -> MetricSample:
        """Return the model's metric of that family with exactly these labels.

        Raises:
            TritonModelException: there is none.
        """
        return self._runtime.metrics.sample(family, labels or {})

    def close(self) -> None:
        """End what runs, finalise the model and forget its modules; once.

        Raises:
            TritonModelException: a batch does not end within the response_timeout, or 5 seconds.
            Exception: whatever ``finalize`` raises.
        """
        if self._instance.closed:
            return
        self._instance.closed = True
        try:
            self._instance.close()
            self._runtime.bls_allowed = False
            if hasattr(self.model, "finalize"):
                with _runtime.use(self._runtime, lasting=True):
                    self.model.finalize()
        finally:
            self._runtime.bls_allowed = False
            _runtime.stop_using(self._runtime)
            self._source.unload()

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

    def _check_open(self) -> None:
        if self._instance.closed:
            raise TritonModelException("The model has been finalized.")

    def _timeout_error(self) -> str:
        return (
            f"Model '{self.args['model_name']}' has not ended its responses within the "
            f"response_timeout of {self._response_timeout:g} seconds."
        )
