"""The holder and the listener of a call, which record what they are told."""

from __future__ import annotations

from collections.abc import Callable

from host.inference.call import Call, CallHolder
from host.inference.request import InferResponse


class RecordingHolder(CallHolder):
    """Records cancelled calls. `model_has_calls`: whether their model may still respond."""

    def __init__(
        self, model_has_calls: bool = False, on_cancel: Callable[[Call], object] | None = None
    ) -> None:
        self.cancelled: list[Call] = []
        self._model_has_calls = model_has_calls
        self._on_cancel = on_cancel

    def cancel_call(self, call: Call) -> bool:
        self.cancelled.append(call)
        if self._on_cancel is not None:
            self._on_cancel(call)
        return self._model_has_calls


class RecordingListener:
    """Records responses and ends. `on_finish` is called at the end of a call."""

    observes_responses = True

    def __init__(self, on_finish: Callable[[Call], None] | None = None) -> None:
        self.responses: list[InferResponse] = []
        self.finished: list[Call] = []
        self._on_finish = on_finish

    def call_responded(self, call: Call, response: InferResponse) -> None:
        self.responses.append(response)

    def call_finished(self, call: Call) -> None:
        self.finished.append(call)
        if self._on_finish is not None:
            self._on_finish(call)
