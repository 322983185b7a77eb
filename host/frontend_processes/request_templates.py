"""Recurring requests: the core gets all fields twice, and then only the id and the tensors.

Clients repeat their requests with other tensors. `InferRequest.shape` tells which ones.
The core validates both for their model, and needs to look at no field of the others. The first one
gets no template, as most requests with tensors as JSON never recur: they would push others out.
"""

from __future__ import annotations

from host.frontend_processes.exchanged_memory import CoreMemory, RegionPlace
from host.frontend_processes.frontend_messages import Infer, RepeatedInfer
from host.inference.request import InferRequest, RequestShape, Tensor

_MAX_TEMPLATES = 256  # of one frontend process
_MAX_SEEN = 256  # requests that may recur


class SentTemplates:
    """The templates that the core has, in a frontend process."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[object, ...], int] = {}
        self._seen: set[tuple[object, ...]] = set()  # sent once, without a template

    def find(self, request: InferRequest, unary: bool) -> int:
        """The number of the template of a request, 0 if the core has none."""
        if request.shape is None or request.parameters:  # forwarded headers may differ
            return 0
        return self._numbers.get(_template_key(request, unary), 0)

    def assign_number(self, request: InferRequest, unary: bool) -> int:
        """The number for a request without a template.

        0 if it cannot be one, or is the first of its kind, which is remembered.
        """
        if (
            request.shape is None
            or request.parameters
            or request.classification is not None
            or request.output_placement is not None
            or any(isinstance(tensor.data, RegionPlace) for tensor in request.inputs)
        ):
            return 0
        key = _template_key(request, unary)
        if key in self._seen:
            return len(self._numbers) % _MAX_TEMPLATES + 1
        if len(self._seen) == _MAX_SEEN:
            self._seen.clear()
        self._seen.add(key)
        return 0

    def add(self, request: InferRequest, unary: bool, number: int) -> None:
        """Called when a request without a template was sent as template `number`."""
        if number == 1:
            self._numbers.clear()
        # Each entry is a new one: the number of entries gives the next number.
        key = _template_key(request, unary)
        self._seen.remove(key)
        self._numbers[key] = number


def _template_key(request: InferRequest, unary: bool) -> tuple[object, ...]:
    return (
        request.shape,
        request.model_name,
        request.model_version,
        unary,
        request.correlation_id,
        request.flags,
    )


class RequestTemplate(RequestShape):
    """A request without its id and the content of its tensors."""

    __slots__ = ("unary", "_fields", "_inputs")

    def __init__(self, message: Infer, request: InferRequest) -> None:
        """`request`: the request of the message, before the core has got it."""
        super().__init__()
        self.unary = message.unary
        self._fields = request
        self._inputs = [
            (
                wire.name,
                wire.datatype,
                wire.shape[:],
                wire.size if wire.data is None else len(wire.data),
            )
            for wire in message.inputs
        ]

    def build_request(self, message: RepeatedInfer, memory: CoreMemory) -> InferRequest:
        """The request of a message. Raises ValueError if its tensors are not those expected."""
        fields = self._fields
        contents = message.contents
        if len(contents) != len(self._inputs):
            raise ValueError(f"{len(contents)} inputs, expected {len(self._inputs)}")
        inputs: list[Tensor] = []
        for (name, datatype, shape, size), content in zip(self._inputs, contents):  # noqa: B905
            if isinstance(content, int):
                inputs.append(memory.decode_block(name, datatype, shape[:], content, size))
            elif len(content) == size:
                inputs.append(Tensor(name, datatype, shape[:], content))
            else:
                raise ValueError(f"input '{name}' of {len(content)} bytes, expected {size}")
        return InferRequest(
            fields.model_name,
            inputs,
            fields.model_version,
            message.id,
            fields.requested_outputs[:],
            {},
            fields.correlation_id,
            fields.flags,
            fields.priority,
            fields.timeout_us,
            shape=self,
        )


class ReceivedTemplates:
    """The templates of one frontend process, in the core."""

    def __init__(self) -> None:
        self._templates: dict[int, RequestTemplate] = {}

    def add(self, message: Infer, request: InferRequest) -> None:
        """Keeps the template that a message announces. Raises ValueError if it announces none."""
        if (
            not 0 < message.template <= _MAX_TEMPLATES
            or message.parameters
            or message.classes is not None
            or message.placement is not None
            or any(wire.region is not None for wire in message.inputs)
        ):
            raise ValueError(f"request {message.number} cannot be template {message.template}")
        fields = InferRequest(
            request.model_name,
            [],
            request.model_version,
            requested_outputs=request.requested_outputs[:],
            correlation_id=request.correlation_id,
            flags=request.flags,
            priority=request.priority,
            timeout_us=request.timeout_us,
        )
        self._templates[message.template] = RequestTemplate(message, fields)

    def get(self, number: int) -> RequestTemplate:
        """The template with a number. Raises KeyError for an unknown one."""
        return self._templates[number]
