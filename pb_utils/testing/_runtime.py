"""What a model in a harness reaches through the API, in place of a server."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pb_utils import _runtime
from pb_utils._logger import Logger
from pb_utils._model_exception import TritonModelException
from pb_utils._response import InferenceResponse
from pb_utils._stream import ResponseStream
from pb_utils.testing._messages import error_response
from pb_utils.testing._metrics import Metrics
from pb_utils.testing._other_models import OtherModels

if TYPE_CHECKING:
    from pb_utils._request_fields import RequestFields
    from pb_utils._runtime import ResponseReceiver


class LogRecord(NamedTuple):
    """A message that the model wrote by ``Logger``, or the harness about it."""

    level: Logger.LogLevel
    message: str
    filename: str
    line: int


class HarnessRuntime:
    """Answers the model's calls of the API from what the test has given."""

    def __init__(
        self,
        model_dir: Path,
        instance_name: str,
        others: OtherModels,
        logs: list[LogRecord],
        seconds: float,
        on_log: Callable[[LogRecord], None] | None = None,
    ) -> None:
        """Begin before ``initialize``: other models cannot be asked yet."""
        self._on_log = on_log
        self.bls_allowed = False
        self.metrics = Metrics()
        self._model_dir = model_dir
        self._instance_name = instance_name
        self._others = others
        self._logs = logs
        self._response_timeout = seconds

    def log(self, level: int, filename: str, line: int, message: str) -> None:
        """Keep a message."""
        record = LogRecord(Logger.LogLevel(level), message, filename, line)
        self._logs.append(record)
        if self._on_log is not None:
            self._on_log(record)

    def model_dir(self) -> str:
        """Return the folder of the model's version."""
        return str(self._model_dir)

    def free_memory(self) -> int:
        """Refuse: here, tensors lie in the memory of this process."""
        raise TritonModelException(
            "free_memory() needs a host that runs the model: there is no shared memory in a test"
            " that uses pb_utils.testing"
        )

    def exec(self, request: RequestFields) -> InferenceResponse:
        """Have another model answer, in this thread."""
        self._check_bls_allowed()
        stream = ResponseStream()
        cancelled = threading.Event()
        stream.set_cancel_callback(cancelled.set)
        with _runtime.use(self, lasting=True):
            self._others.infer(request, False, stream.put_response, cancelled)
        text = (
            f"Model '{request._model_name}' has not answered within the response_timeout of "
            f"{self._response_timeout:g} seconds."
        )
        stream.set_timeout(self._response_timeout, text)
        response = stream.next_response()
        assert response is not None
        return response

    def send_request(
        self, request: RequestFields, decoupled: bool, receive: ResponseReceiver
    ) -> Callable[[], None]:
        """Have another model answer, in a thread of its own."""
        self._check_bls_allowed()
        cancelled = threading.Event()

        def answer() -> None:
            try:
                with _runtime.use(self, lasting=True):
                    self._others.infer(request, decoupled, receive, cancelled)
            except Exception as error:  # of a test's author; it is the answer
                receive(
                    error_response(
                        f"what stands for model '{request._model_name}' in this test raised "
                        f"{type(error).__name__}: {error}"
                    ),
                    True,
                )

        context = contextvars.copy_context()
        threading.Thread(
            target=context.run, args=(answer,), name="pb_utils-other", daemon=True
        ).start()
        return cancelled.set

    def load_model(self, name: str, config: str, files: Mapping[str, bytes]) -> None:
        """Load another model."""
        try:
            self._others.load_model(name, config, files)
        except TritonModelException as error:
            raise self._as_server_error(error) from None

    def unload_model(self, name: str, dependents: bool) -> None:
        """Unload another model."""
        self._others.unload_model(name)

    def is_model_ready(self, name: str, version: str) -> bool:
        """Return whether another model would answer."""
        try:
            return self._others.is_model_ready(name, version)
        except TritonModelException as error:
            raise self._as_server_error(error) from None

    def new_metric_family(self, name: str, description: str, kind: int) -> int:
        """Register a metric family."""
        try:
            return self.metrics.new_family(name, kind)
        except TritonModelException as error:
            raise self._as_server_error(error) from None

    def new_metric(
        self, family: int, labels: Mapping[str, object], buckets: Sequence[float] | None
    ) -> int:
        """Make a metric."""
        try:
            return self.metrics.new_metric(family, labels, buckets)
        except TritonModelException as error:
            raise self._as_server_error(error) from None

    def change_metric(self, metric: int, change: str, value: float) -> None:
        """Change a metric."""
        self.metrics.change(metric, change, value)

    def read_metric(self, metric: int) -> float:
        """Return a metric's value."""
        return self.metrics.read(metric)

    def drop_metrics(self, families: Sequence[int], metrics: Sequence[int]) -> None:
        """Forget metrics."""
        self.metrics.drop(families, metrics)

    def error_message(self, text: str) -> str:
        """Return a refusal as a server words it."""
        return f"Failed to process the request for model '{self._instance_name}', message: {text}"

    def _as_server_error(self, error: TritonModelException) -> TritonModelException:
        return TritonModelException(self.error_message(str(error)))

    def _check_bls_allowed(self) -> None:
        if not self.bls_allowed:
            raise TritonModelException("BLS is only supported during the 'execute' function.")
