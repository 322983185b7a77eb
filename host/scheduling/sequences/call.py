"""A request of a sequence on its way, the sequence, and what stands in for a missing request."""

from __future__ import annotations

from collections import abc, deque

from host.errors import HostError, invalid_argument
from host.inference.request import Call, CallHolder, InferRequest, InferResponse, Tensor
from host.inference.shared_memory_bytes import SharedMemoryBytes
from host.scheduling.ordering import OrderedCall

START, END = 1, 2
"""Flags of requests."""

Id = int | str


class Sequence:
    """Requests that share a correlation id, from a START to an END, and the slot they have."""

    __slots__ = ("id", "calls", "sequence_batch", "number", "ending", "overdue", "dead", "states")

    def __init__(self, correlation_id: Id) -> None:
        self.id = correlation_id
        self.calls: deque[SequenceCall] = deque()  # those that have not been handed on
        self.sequence_batch: CallHolder | None = None  # None while it waits in the backlog
        self.number = 0
        self.ending = False  # no more requests come: the slot is free once none is left
        self.overdue = False  # it was idle for too long while it had no slot
        self.dead = False
        self.states: dict[str, Tensor] | None = None


class SequenceCall(OrderedCall):
    """A call of a sequence; it can be run again, and gives the sequence its next states."""

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
        """Add what the model gets beside the client's tensors.

        Outputs in `kept` (by their names: an input's name and a data type) go into `states`;
        `outputs` are those that all clients may ask for.
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
        """Undo `equip`: the request is as the client sent it."""
        request = self.request
        request.inputs = request.inputs[: self._given]
        if self._kept:
            request.requested_outputs = self._wanted

    def prepare_response(self, response: InferResponse) -> None:
        """Keep the states; the client sees those that it may ask for and has asked for."""
        if not self._kept or response.error is not None:
            return
        try:
            for tensor in response.outputs:
                if tensor.name in self._kept:
                    self._keep_state(tensor)
        except HostError as error:
            response.error = error.with_traceback(None)  # that refers to the response
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
        if isinstance(owner, SharedMemoryBytes):  # the client wants it as well, and could change it
            data, owner = bytes(owner), None
        self._states[name] = Tensor(name, datatype, tensor.shape, data, owner)

    def try_reschedule(self) -> bool:
        """Whether the model may have it run once more."""
        sequence = self.sequence
        self.again = self.iterates and sequence is not None and not sequence.dead
        return self.again


class PaddingCall(Call):
    """Fills the row of a slot that has nothing to do: nobody asks for it or hears of it."""

    __slots__ = ()

    def respond(self, response: InferResponse | None, final: bool = True) -> None:
        """Drop it."""
        if final:
            self.finished = True
            self.request.inputs = []


def _wrong_type(tensor: Tensor, expected: str) -> HostError:
    return invalid_argument(
        f"state output '{tensor.name}' has data-type '{tensor.datatype}', but its configuration"
        f" in 'sequence_batching' expects '{expected}'"
    )
