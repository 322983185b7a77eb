"""The payload of messages between host and stub: tensors, requests, responses."""

from typing import Dict, List, Optional, Tuple, Union

import msgspec

Parameter = Union[bool, int, float, str]

INLINE_ALWAYS = 1 << 11
"""Tensors of at most this many bytes are always inline in the message."""

INLINE_LIMIT = 1 << 16
"""Tensors of at most this many bytes are inline if the ring has room for many such messages.

A block in shared memory needs bookkeeping in two processes: allocate, export and release. Inline
tensors need none.
"""


class WireTensor(msgspec.Struct, array_like=True, gc=False):
    """A tensor: its bytes inline in `data`, or a block `(arena, offset, size)` in shared memory.

    `code` is Triton's data-type number; `size` is in bytes.
    """

    name: str
    code: int
    shape: List[int]
    data: Optional[bytes] = None
    arena: int = 0
    offset: int = 0
    size: int = 0


OutputPlacement = Tuple[int, int, int]
"""The place for an output in a client's region: (arena, offset, size in bytes)."""


class WireError(msgspec.Struct, array_like=True, gc=False):
    """An error: the number of a `TritonError` code (docs/reference/model-api.md, "Errors"), and the
    text.
    """

    code: int
    message: str


class TraceLink(msgspec.Struct, array_like=True, gc=False):
    """The trace of a request: its number in the host, and its W3C headers as JSON."""

    number: int
    context: Optional[str] = None


class WireRequest(msgspec.Struct, array_like=True):
    """An inference request.

    Empty `outputs` mean all outputs of the model's configuration. Outputs in `output_placement` are
    written there if they fit. `max_outstanding_responses` limits the unacknowledged responses; 0
    means the limit of the instance.
    """

    id: str
    inputs: List[WireTensor]
    outputs: List[str]
    parameters: Dict[str, Parameter]
    correlation_id: Union[int, str] = 0
    flags: int = 0
    timeout: int = 0
    model: str = ""
    version: int = -1
    trace: Optional[TraceLink] = None
    output_placement: Optional[Dict[str, OutputPlacement]] = None
    max_outstanding_responses: int = 0


class WireResponse(msgspec.Struct, array_like=True):
    """An inference response; with an `error`, the other fields are not used."""

    outputs: List[WireTensor]
    parameters: Dict[str, Parameter]
    error: Optional[WireError] = None
