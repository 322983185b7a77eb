"""Requests that a client sends again with other tensors, recognised instead of taken apart.

All but the id and the tensors of a ModelInferRequest is the same bytes each time. Where the codec
takes 18 µs for a request with one small tensor, on a slow machine, this takes 6.
"""

from __future__ import annotations

from tritonclient.grpc import service_pb2 as pb

from host.errors import HostError
from host.frontends.grpc.codec import ID, RAW, VIEW_FROM, InferMessage, parse_infer_request
from host.inference.request import Buffer, InferRequest, Tensor

_LONGEST = 512  # bytes of a request without its tensors that are remembered
_MOST = 256  # names of models, and requests that came once
_FORMS = 1024  # requests, each of another shape, or with other parameters: a sequence has its own


class _Known:
    """A request without its id and its tensors: the bytes before the id and behind it.

    With one tensor only, `until` are those from the id to that tensor, of `size` bytes.
    """

    __slots__ = ("before", "behind", "inputs", "message", "pattern", "plain", "size", "until")

    def __init__(
        self,
        before: bytes,
        behind: bytes,
        tensors: bytes,
        message: InferMessage,
        request: InferRequest,
    ) -> None:
        """`tensors` is what comes after the others, `message` what those are."""
        self.message = message
        self.before = before
        self.behind = behind
        self.size = len(request.inputs[0].data) if len(request.inputs) == 1 else 0
        self.until = behind + tensors[: -self.size] if self.size else b""
        self.inputs = [(entry.name, entry.datatype, entry.shape[:]) for entry in request.inputs]
        self.pattern = InferRequest(
            request.model_name,
            [],
            request.model_version,
            requested_outputs=request.requested_outputs[:],
            parameters=request.parameters.copy(),
            correlation_id=request.correlation_id,
            flags=request.flags,
            priority=request.priority,
            timeout_us=request.timeout_us,
        )
        self.plain = self.pattern == InferRequest(
            request.model_name,
            [],
            request.model_version,
            requested_outputs=request.requested_outputs,
        )

    def request(self, inputs: list[Tensor], request_id: str, form: object = None) -> InferRequest:
        """Another request like it."""
        pattern = self.pattern
        request = InferRequest(
            pattern.model_name,
            inputs,
            pattern.model_version,
            request_id,
            pattern.requested_outputs[:],
            form=form,
        )
        if not self.plain:
            request.parameters = pattern.parameters.copy()
            request.correlation_id = pattern.correlation_id
            request.flags = pattern.flags
            request.priority = pattern.priority
            request.timeout_us = pattern.timeout_us
        return request


class Recurring:
    """The last requests to each model, as far as the next one may repeat one of them."""

    def __init__(self) -> None:
        self._last: dict[bytes, _Known] = {}  # by the field with the name of the model
        self._known: dict[bytes, _Known] = {}  # by the request without id and tensors
        self._seen: dict[bytes, None] = {}  # requests without id and tensors, met once

    def request(self, data: bytes) -> tuple[InferRequest, InferMessage] | None:
        """What the bytes of a ModelInferRequest ask for, or None if they are not known.

        Large tensors are views of `data`. The message has neither the id nor the tensors.
        """
        try:
            model = data[: data[1] + 2]
            known = self._last.get(model)
            if known is None:
                return None
            request = _recognised(known, data)
            if request is None:
                known = self._known.get(_fixed(data))
                if known is None:
                    return None
                self._last[model] = known
                request = _recognised(known, data)
        except (IndexError, UnicodeDecodeError):
            return None
        return None if request is None else (request, known.message)

    def learn(self, data: bytes, message: InferMessage, request: InferRequest) -> None:
        """Remember what these bytes were understood as, if the next ones can be recognised."""
        tensors = sum(_field_size(len(raw)) for raw in message.raw)
        if (
            not 0 < len(message.model_name.encode()) < 128
            or request.slots
            or request.classes
            or len(message.raw) != len(message.inputs)
            or len(data) - tensors > _LONGEST
        ):
            return
        before = pb.ModelInferRequest(
            model_name=message.model_name, model_version=message.model_version
        ).SerializeToString()
        start = len(before)
        if message.id:
            start += _field_size(len(message.id.encode()))
        behind = data[start : len(data) - tensors]
        if self._is_first(before + behind):
            return
        try:
            rest = parse_infer_request(before + behind)
        except HostError:
            return
        if rest != InferMessage(
            message.model_name,
            message.model_version,
            inputs=message.inputs,
            outputs=message.outputs,
            parameters=message.parameters,
        ):
            return  # its fields come in another order
        if len(self._last) >= _MOST:
            self._last.clear()
        if len(self._known) >= _FORMS:
            del self._known[next(iter(self._known))]
        known = _Known(before, behind, data[-tensors:], rest, request)
        self._known[before + behind] = self._last[data[: data[1] + 2]] = known

    def _is_first(self, fixed: bytes) -> bool:
        """Whether a request with these bytes comes for the first time.

        Learning costs as much as taking a request apart; of those that come once, there are many.
        """
        if fixed in self._seen:
            del self._seen[fixed]
            return False
        if len(self._seen) >= _MOST:
            self._seen.clear()
        self._seen[fixed] = None
        return True


def _recognised(known: _Known, data: bytes) -> InferRequest | None:
    """The request, if it is one like the known one. Raises IndexError or UnicodeDecodeError."""
    if not data.startswith(known.before):
        return None
    position = len(known.before)
    request_id = ""
    if data[position] == ID:
        start = position + 2
        position = start + data[position + 1]  # of a longer one, the rest will not fit
        request_id = data[start:position].decode()
    view: Buffer = data if len(data) < VIEW_FROM else memoryview(data)
    until = known.until
    if until and data.startswith(until, position):
        position += len(until)
        if len(data) != position + known.size:
            return None
        name, datatype, shape = known.inputs[0]  # all is as it was
        return known.request([Tensor(name, datatype, shape[:], view[position:])], request_id, known)
    if not data.startswith(known.behind, position):
        return None
    position += len(known.behind)
    inputs: list[Tensor] = []
    for name, datatype, shape in known.inputs:
        if data[position] != RAW:
            return None
        length = data[position + 1]
        position += 2
        if length > 127:
            length, position = _long(data, length, position)
        start = position
        position += length
        inputs.append(Tensor(name, datatype, shape[:], view[start:position]))
    return known.request(inputs, request_id) if position == len(data) else None


def _fixed(data: bytes) -> bytes:
    """What comes before the tensors, without the id; empty if it is long. Raises IndexError."""
    position, end = 0, len(data)
    before, start = b"", 0
    while position < end and (tag := data[position]) != RAW:
        field = position
        length = data[position + 1]
        position += 2
        if length > 127:
            length, position = _long(data, length, position)
        position += length
        if position > 2 * _LONGEST:
            return b""
        if tag == ID:
            before, start = data[:field], position
    return before + data[start:position]


def _long(data: bytes, length: int, position: int) -> tuple[int, int]:
    """A length of several bytes, the first of which was read, and where it ends."""
    length &= 127
    for shift in (7, 14, 21, 28):
        byte = data[position]
        position += 1
        length |= (byte & 127) << shift
        if byte < 128:
            break
    return length, position


def _field_size(length: int) -> int:
    """Bytes of a length-delimited field whose number is below 16."""
    return 1 + max(1, -(-length.bit_length() // 7)) + length
