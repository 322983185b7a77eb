"""What messages carry between host and stub: tensors, requests, responses."""

from typing import Dict, List, Optional, Tuple, Union

import msgspec

Parameter = Union[bool, int, float, str]

INLINE_ALWAYS = 1 << 11
"""Tensors of at most this many bytes travel inside the message."""

INLINE_LIMIT = 1 << 16
"""Those of at most so many do if the ring has room for many such messages. A block in shared memory
costs bookkeeping in two processes (allocate, lend, return), which these few copies do not."""


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
"""Where in a client's region an output is to be written: (arena, offset, room in bytes)."""


class WireError(msgspec.Struct, array_like=True, gc=False):
    """An error as data: the number of a `TritonError` code (pb_utils spec 3.11), and the text."""

    code: int
    message: str


class TraceLink(msgspec.Struct, array_like=True, gc=False):
    """What a request carries of its trace: its number at the host, and what the model may know of
    it, the W3C headers as JSON.
    """

    number: int
    context: Optional[str] = None


class WireRequest(msgspec.Struct, array_like=True):
    """An inference request. No `outputs` means all that the model's configuration lists; those in
    `output_placement` are written there if they fit. `max_outstanding_responses` is how many
    responses may be under way, if not as many as usual.
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
    """An inference response; with an `error`, nothing else counts."""

    outputs: List[WireTensor]
    parameters: Dict[str, Parameter]
    error: Optional[WireError] = None
