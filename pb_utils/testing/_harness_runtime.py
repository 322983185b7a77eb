"""The runtime of a model in a test, instead of a server."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pb_utils import _model_texts as texts
from pb_utils import _runtime
from pb_utils._bls import ResponseStream
from pb_utils._exceptions import TritonModelException
from pb_utils._logger import Logger
from pb_utils._request import InferenceRequest
from pb_utils._response import InferenceResponse
from pb_utils.testing._messages import error_response
from pb_utils.testing._metric_samples import Metrics
from pb_utils.testing._other_models import OtherModels

if TYPE_CHECKING:
    from pb_utils._request_fields import RequestFields
    from pb_utils._runtime import ResponseReceiver


class LogRecord(NamedTuple):
    """A message that the model logged by ``Logger``, or that the harness logged about it.

    Attributes:
        level: level of the message.
        message: the text.
        filename: base name of the file that logged it.
        line: line in the file.
    """

    level: Logger.LogLevel
    message: str
    filename: str
    line: int


class HarnessRuntime(_runtime.Runtime):
    """Serves the model's calls of the API from the objects of the test."""

    def __init__(
        self,
        model_dir: Path,
        instance_name: str,
        other_models: OtherModels,
        logs: list[LogRecord],
        response_timeout: float,
        on_log: Callable[[LogRecord], None] | None = None,
    ) -> None:
        """Creates the runtime. BLS is not allowed before ``initialize`` has ended."""
        self._on_log = on_log
        self.bls_allowed = False
        self.metrics = Metrics()
        self._model_dir = model_dir
        self._instance_name = instance_name
        self._other_models = other_models
        self._logs = logs
        self._response_timeout = response_timeout

    def log(self, level: int, filename: str, line: int, message: str) -> None:
        """Records a message."""
        record = LogRecord(Logger.LogLevel(level), message, filename, line)
        self._logs.append(record)
        if self._on_log is not None:
            self._on_log(record)

    def model_dir(self) -> str:
        """Returns the folder of the model's version."""
        return str(self._model_dir)

    def free_memory(self) -> int:
        """Always raises TritonModelException: a test has no shared memory."""
        raise TritonModelException(
            "free_memory() needs a host that runs the model: there is no shared memory in a test"
            " that uses pb_utils.testing"
        )

    def exec(self, request: RequestFields) -> InferenceResponse:
        """Sends a request to a stand-in, which runs in the current thread."""
        assert isinstance(request, InferenceRequest)
        self._check_bls_allowed()
        stream = ResponseStream()
        cancelled = threading.Event()
        stream.set_cancel_callback(cancelled.set)
        with _runtime.use(self, persistent=True):
            self._other_models.infer(request, False, stream.put_response, cancelled)
        text = (
            f"Model '{request._model_name}' did not respond within the response_timeout of "
            f"{self._response_timeout:g} seconds."
        )
        stream.set_timeout(self._response_timeout, text)
        response = stream.next_response()
        assert response is not None
        return response

    def send_request(
        self, request: RequestFields, decoupled: bool, receive: ResponseReceiver
    ) -> Callable[[], None]:
        """Sends a request to a stand-in, which runs in a thread of its own."""
        assert isinstance(request, InferenceRequest)
        self._check_bls_allowed()
        cancelled = threading.Event()

        def run_stand_in() -> None:
            try:
                with _runtime.use(self, persistent=True):
                    self._other_models.infer(request, decoupled, receive, cancelled)
            except Exception as error:  # any exception of the test's function becomes the response
                receive(
                    error_response(
                        f"the stand-in for model '{request._model_name}' raised "
                        f"{type(error).__name__}: {error}"
                    ),
                    True,
                )

        context = contextvars.copy_context()
        threading.Thread(
            target=context.run, args=(run_stand_in,), name="pb_utils-other", daemon=True
        ).start()
        return cancelled.set

    def load_model(self, name: str, config: str, files: Mapping[str, bytes], hold: bool) -> None:
        """Loads another model."""
        with self._server_errors():
            self._other_models.load_model(name, config, files, hold)

    def unload_model(self, name: str, dependents: bool) -> None:
        """Unloads another model."""
        self._other_models.unload_model(name)

    def is_model_ready(self, name: str, version: str) -> bool:
        """Returns whether another model is ready."""
        with self._server_errors():
            return self._other_models.is_model_ready(name, version)

    def new_metric_family(self, name: str, description: str, kind: int) -> int:
        """Registers a metric family."""
        with self._server_errors():
            return self.metrics.new_family(name, kind)

    def new_metric(
        self, family: int, labels: Mapping[str, object], buckets: Sequence[float] | None
    ) -> int:
        """Creates a metric."""
        with self._server_errors():
            return self.metrics.new_metric(family, labels, buckets)

    def change_metric(self, metric: int, change: str, value: float) -> None:
        """Changes a metric."""
        self.metrics.change(metric, change, value)

    def read_metric(self, metric: int) -> float:
        """Returns the value of a metric."""
        return self.metrics.read(metric)

    def drop_metrics(self, families: Sequence[int], metrics: Sequence[int]) -> None:
        """Removes metrics."""
        self.metrics.drop(families, metrics)

    def error_message(self, text: str) -> str:
        """Returns the text that a server gives for a rejected call."""
        return texts.failed_call(self._instance_name, text)

    @contextmanager
    def _server_errors(self) -> Iterator[None]:
        """Raises errors with the text of a server."""
        try:
            yield
        except TritonModelException as error:
            raise TritonModelException(self.error_message(str(error))) from None

    def _check_bls_allowed(self) -> None:
        if not self.bls_allowed:
            raise TritonModelException(texts.BLS_NOT_ALLOWED)
