"""A runtime and a responder that record the calls of the API."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from pb_utils import InferenceResponse, TritonModelException
from pb_utils._request_fields import RequestFields
from pb_utils._response import Responder
from pb_utils._runtime import ResponseReceiver, Runtime


class SentRequest:
    """A request that was sent without waiting. The test sends its responses by ``receive``."""

    def __init__(self, request: RequestFields, decoupled: bool, receive: ResponseReceiver) -> None:
        self.request = request
        self.decoupled = decoupled
        self.receive = receive
        self.cancellations = 0

    def cancel(self) -> None:
        self.cancellations += 1


class RecordingRuntime(Runtime):
    """Records every call. If ``refuses`` is set, it rejects calls with that text."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, str, int, str]] = []
        self.requests: list[RequestFields] = []
        self.sent_requests: list[SentRequest] = []
        self.on_request: Callable[[SentRequest], None] = lambda sent_request: None
        self.response = InferenceResponse()
        self.calls: list[tuple[object, ...]] = []
        self.refuses: str | None = None
        self.value = 0.0
        self.ready = True

    def log(self, level: int, filename: str, line: int, message: str) -> None:
        self.lines.append((level, filename, line, message))

    def exec(self, request: RequestFields) -> InferenceResponse:
        self.requests.append(request)
        return self.response

    def waiting(self) -> AbstractContextManager[None]:
        return nullcontext()

    def send_request(
        self, request: RequestFields, decoupled: bool, receive: ResponseReceiver
    ) -> Callable[[], None]:
        self._call()
        sent_request = SentRequest(request, decoupled, receive)
        self.sent_requests.append(sent_request)
        self.on_request(sent_request)
        return sent_request.cancel

    def free_memory(self) -> int:
        return 1 << 20

    def model_dir(self) -> str:
        return "/models/m/1"

    def load_model(self, name: str, config: str, files: Mapping[str, bytes], hold: bool) -> None:
        self._call("load", name, config, dict(files), *["held"] * hold)

    def unload_model(self, name: str, dependents: bool) -> None:
        self._call("unload", name, dependents)

    def is_model_ready(self, name: str, version: str) -> bool:
        self._call("ready?", name, version)
        return self.ready

    def new_metric_family(self, name: str, description: str, kind: int) -> int:
        self._call("family", name, description, kind)
        return len(self.calls)

    def new_metric(
        self, family: int, labels: Mapping[str, object], buckets: Sequence[float] | None
    ) -> int:
        self._call("metric", family, dict(labels), None if buckets is None else list(buckets))
        return len(self.calls)

    def change_metric(self, metric: int, change: str, value: float) -> None:
        self._call(change, metric, value)

    def read_metric(self, metric: int) -> float:
        self._call("read", metric)
        return self.value

    def drop_metrics(self, families: Sequence[int], metrics: Sequence[int]) -> None:
        self.calls.append(("drop", list(families), list(metrics)))

    def error_message(self, text: str) -> str:
        return f"<{text}>"

    def _call(self, *call: object) -> None:
        if self.refuses is not None:
            raise TritonModelException(self.refuses)
        if call:
            self.calls.append(call)


class RecordedResponder(Responder):
    """A received request that records its responses."""

    def __init__(self, decoupled: bool = False) -> None:
        super().__init__(decoupled)
        self.delivered: list[tuple[InferenceResponse | None, bool]] = []
        self.is_cancelled_results: list[bool] = []

    def is_cancelled(self) -> bool:
        return self.is_cancelled_results.pop(0)

    def _wait_for_credit(self) -> None:
        pass

    def _wake_senders(self) -> None:
        pass

    def _send_response(self, response: InferenceResponse | None, final: bool) -> None:
        self.delivered.append((response, final))
