"""The compiled lane: reads and writes usual bytes faster, if it is built and not turned off.

What it does not take, and all of it without the lane, is done by the Python code beside its users,
which has the rules.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from host.lane.sources import digest

if TYPE_CHECKING:
    from collections.abc import Callable

    from host.lane._lane import (
        EncodeResponse,
        HeaderReader,
        MessageReader,
        RequestFrames,
        ResultsReader,
        StreamMessages,
    )

VARIABLE = "PBHOST_LANE"
"""The environment variable that turns the lane off with `0`, also when the package is built."""

header_reader: type[HeaderReader] | None = None
message_reader: type[MessageReader] | None = None
read_request: Callable[[bytes, int, int], RequestFrames | None] | None = None
read_messages: Callable[[bytes, int, int], StreamMessages | None] | None = None
encode_response: EncodeResponse | None = None
encode_message: Callable[[bytes, bytes, int, bytes], bytes] | None = None
results_reader: type[ResultsReader] | None = None
write_record: Callable[[memoryview, int, bytes], int] | None = None
read_record: Callable[[memoryview, int, int], bytes | None] | None = None
state = f"off ({VARIABLE}=0)"
"""Whether the lane is used, for the log."""

if os.environ.get(VARIABLE) != "0":
    try:
        import host.lane._lane as _lane  # a missing one raises ModuleNotFoundError

        if getattr(_lane, "SOURCES", None) != digest():
            raise ImportError("it was built from other sources; run pip install again")
        from host.lane._lane import HeaderReader, MessageReader, ResultsReader
        from host.lane._lane import encode_message as _encode_message
        from host.lane._lane import encode_response as _encode_response
        from host.lane._lane import read_messages as _read_messages
        from host.lane._lane import read_record as _read_record
        from host.lane._lane import read_request as _read_request
        from host.lane._lane import write_record as _write_record
    except ModuleNotFoundError:
        state = "not built"
    except ImportError as error:
        state = f"off (it cannot be loaded: {error})"
    else:
        header_reader, message_reader, state = HeaderReader, MessageReader, "on"
        read_request, read_messages, encode_message = _read_request, _read_messages, _encode_message
        results_reader, encode_response = ResultsReader, _encode_response
        write_record, read_record = _write_record, _read_record
