"""A request that is traced: how far it has come when, and with what tensors."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from host.inference.request import InferRequest, InferResponse, Tensor, Times
from host.tracing.context import Spans
from host.tracing.tensors import tensor_json
from stub.wire.payload import TraceLink

Moment = tuple[str, int]
"""What has happened, and when: CLOCK_MONOTONIC nanoseconds."""


class Family:
    """A trace and those of what models asked on its behalf, which are told of together.

    `over` is called once, when nothing is to come of any of them.
    """

    __slots__ = ("_open", "_over", "ended", "tensors", "traces")

    def __init__(self, over: Callable[[Family], None], tensors: bool = False) -> None:
        self.traces: list[Trace] = []
        self.tensors = tensors
        self.ended = False
        self._open = 0
        self._over = over

    def hold(self) -> None:
        """Something is to come."""
        self._open += 1

    def release(self) -> None:
        """It has come."""
        self._open -= 1
        if not self._open and not self.ended:
            self.ended = True
            self._over(self)


class Trace:
    """One request. All methods belong to the event loop's thread.

    `number` is the trace's id, `parent` that of the trace whose request made this one, 0 without
    one. A door says by `open` and `close` that it waits for the responses, and stamps what it does;
    the model says by `begin` that it has taken the request. Nobody else need say that it is there.
    """

    __slots__ = (
        "number",
        "parent",
        "family",
        "spans",
        "model",
        "version",
        "request_id",
        "outside",
        "inside",
        "computing",
        "tensors",
        "error",
        "_next",
        "_at_door",
        "_in_core",
        "_sent",
    )

    def __init__(
        self,
        next_number: Callable[[Trace], int],
        family: Family,
        parent: int = 0,
        spans: Spans | None = None,
    ) -> None:
        self.family = family
        self._next = next_number
        self.number = next_number(self)
        self.parent = parent
        self.spans = spans
        self.model = ""  # not known before a model has accepted the request
        self.version = 0
        self.request_id = ""
        self.outside: list[Moment] = []
        """At the door."""
        self.inside: list[Moment] = []
        """At the model."""
        self.computing: list[Moment] = []
        """In `execute`."""
        self.tensors: list[tuple[str, int, dict[str, str]]] = []
        self.error = ""
        self._at_door = self._in_core = self._sent = False
        family.traces.append(self)

    @property
    def name(self) -> str:
        """The trace's id as it is looked for: that of the spans if there are any."""
        return str(self.number) if self.spans is None else f"{self.spans.trace:032x}"

    @property
    def shows_tensors(self) -> bool:
        """Whether the content of tensors is part of it."""
        return self.family.tensors

    def child(self) -> Trace:
        """The trace of a request that is made on behalf of this one, for its `InferRequest.trace`.

        It is part of the same file elements, or spans; the model that takes the request begins it.
        """
        spans = self.spans
        if spans is not None:
            spans = spans.below(spans.compute if self._sent else spans.model)
        return Trace(self._next, self.family, self.number, spans)

    # The door

    def open(self) -> None:
        """A door waits for the responses."""
        self._at_door = True
        self.family.hold()

    def stamp(self, name: str, ns: int = 0) -> None:
        """Something happens at the door, now unless another time is given."""
        self.outside.append((name, ns or time.monotonic_ns()))

    def close(self) -> None:
        """The door has nothing more to do. A second call does nothing."""
        if self._at_door:
            self._at_door = False
            self.family.release()

    # The model

    def begin(self, request: InferRequest, model: str, version: int, ns: int) -> None:
        """The model takes the request, which was received at this time."""
        if self.family.ended:
            return  # it is asked on behalf of a request that has long been answered
        self._in_core = True
        self.family.hold()
        self.model, self.version, self.request_id = model, version, request.id
        self.inside += ("REQUEST_START", ns), ("QUEUE_START", ns)
        self._note("TENSOR_QUEUE_INPUT", request.inputs)

    def refused(self) -> None:
        """It does not take it after all."""
        self._leave_core()

    def sent(self) -> TraceLink:
        """The request is on its way to an instance: what that may know. `computed` follows."""
        if self._in_core and not self._sent:
            self._sent = True
            self.family.hold()
        spans = self.spans
        return TraceLink(self.number, None if spans is None else spans.context(spans.compute))

    def computed(self, times: Times | None) -> None:
        """Its batch has ended; without times, because the stub died."""
        if not self._sent:
            return
        self._sent = False  # it may be queued and sent again
        if times is not None:
            self.computing += (
                ("COMPUTE_START", times.started),
                ("COMPUTE_INPUT_END", times.inputs_ready),
                ("COMPUTE_OUTPUT_START", times.outputs_begin),
                ("COMPUTE_END", times.ended),
            )
        self.family.release()

    def responded(self, response: InferResponse | None, final: bool) -> None:
        """A response is there, or with None only the end."""
        if response is not None:
            if response.error is not None:
                self.error = response.error.status_string
            else:
                self._note("TENSOR_BACKEND_OUTPUT", response.outputs)
        if final:
            now = time.monotonic_ns()
            if self._at_door:
                self.stamp("INFER_RESPONSE_COMPLETE", now)
            if self._in_core:
                self.inside.append(("REQUEST_END", now))
            self._leave_core()

    def _leave_core(self) -> None:
        if self._in_core:
            self._in_core = False
            self.family.release()

    def _note(self, activity: str, tensors: Sequence[Tensor]) -> None:
        if self.family.tensors:
            now = time.monotonic_ns()
            self.tensors += [(activity, now, tensor_json(tensor)) for tensor in tensors]
