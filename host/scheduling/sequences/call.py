"""Sequences and their calls, and the padding of rows without a request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import abc, deque

from host.errors import HostError, invalid_argument
from host.inference.call import Call, CallHolder, CallState
from host.inference.request import InferRequest, InferResponse, Tensor
from host.inference.shared_memory_bytes import SharedMemoryBytes
from host.scheduling.ordering import OrderedCall

START, END = 1, 2
"""Flags of requests."""

Id = int | str


class SlotHolder(CallHolder, ABC):
    """Has the slots of an instance; each of them is for one sequence."""

    @abstractmethod
    def slot_ready(self, number: int) -> None:
        """Called when a slot may have a call to run."""

    @abstractmethod
    def release_slot(self, number: int) -> None:
        """Frees a slot whose sequence has ended."""

    @abstractmethod
    def report_expired(self) -> None:
        """Tells the model which sequences have ended without an END."""


class Sequence:
    """Requests that share a correlation id, from a START to an END, and their slot."""

    __slots__ = (
        "id",
        "calls",
        "sequence_batch",
        "number",
        "ending",
        "overdue",
        "expired",
        "dead",
        "states",
    )

    def __init__(self, correlation_id: Id) -> None:
        self.id = correlation_id
        self.calls: deque[SequenceCall] = deque()  # calls that were not passed on yet
        self.sequence_batch: SlotHolder | None = None  # None while the sequence is in the backlog
        self.number = 0
        self.ending = False  # no more requests arrive: the slot is free once no call is left
        self.overdue = False  # it was idle for too long in the backlog
        self.expired = False  # it ends without a request with END: the model is told
        self.dead = False
        self.states: dict[str, Tensor] | None = None


class SequenceCall(OrderedCall):
    """A call of a sequence. It can be run again, and its response has the next states."""

    prepares_responses = True

    __slots__ = ("sequence", "again", "iterates", "_given", "_wanted", "_kept", "_states")

    def __init__(self, request: InferRequest) -> None:
        super().__init__(request)
        self.sequence: Sequence | None = None
        self.iterates = False
        self.again = False
        self._given = 0
        self._wanted: list[str] = []
        self._kept: dict[str, tuple[str, str]] = {}
        self._states: dict[str, Tensor] = {}

    def add_controls_and_states(
        self,
        extra: abc.Sequence[Tensor],
        outputs: abc.Sequence[str],
        kept: dict[str, tuple[str, str]],
        states: dict[str, Tensor],
    ) -> None:
        """Adds controls and states to the client's tensors.

        `kept`: outputs that are states; their input names and data types by output name. `states`:
        where they go. `outputs`: those that clients may ask for.
        """
        request = self.request
        self._given = len(request.inputs)
        request.inputs = [*request.inputs, *extra]
        if kept:
            self._wanted = list(request.requested_outputs or outputs)
            self._kept, self._states = kept, states
            more = [name for name in kept if name not in self._wanted]
            request.requested_outputs = self._wanted + more

    def remove_controls_and_states(self) -> None:
        """Restores the request as the client sent it."""
        request = self.request
        request.inputs = request.inputs[: self._given]
        if self._kept:
            request.requested_outputs = self._wanted

    def prepare_response(self, response: InferResponse) -> None:
        """Keeps the states, and removes those that the client did not request."""
        if not self._kept or response.error is not None:
            return
        try:
            for tensor in response.outputs:
                if tensor.name in self._kept:
                    self._keep_state(tensor)
        except HostError as error:
            response.error = error.with_traceback(None)  # it refers to the response
            response.outputs = []
            return
        response.outputs = [
            tensor
            for tensor in response.outputs
            if tensor.name not in self._kept or tensor.name in self._wanted
        ]

    def _keep_state(self, tensor: Tensor) -> None:
        name, datatype = self._kept[tensor.name]
        if tensor.datatype != datatype:
            raise _wrong_type(tensor, datatype)
        data, owner = tensor.data, tensor.owner
        if isinstance(owner, SharedMemoryBytes):  # the client gets it too, and could change it
            data, owner = bytes(owner), None
        self._states[name] = Tensor(name, datatype, tensor.shape, data, owner)

    def try_reschedule(self) -> bool:
        """Whether the model may run the request once more."""
        sequence = self.sequence
        self.again = self.iterates and sequence is not None and not sequence.dead
        return self.again


class PaddingCall(Call):
    """Fills the row of a slot without a request; its response is dropped."""

    __slots__ = ()

    def respond(self, response: InferResponse | None, final: bool = True) -> None:
        """Drops the response."""
        if final:
            self.state = CallState.FINISHED
            self.request.inputs = []


def _wrong_type(tensor: Tensor, expected: str) -> HostError:
    return invalid_argument(
        f"state output '{tensor.name}' has data-type '{tensor.datatype}', but its configuration"
        f" in 'sequence_batching' expects '{expected}'"
    )
