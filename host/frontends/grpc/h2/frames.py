"""HTTP/2 frames: constants, functions that encode them, and the limits of a connection."""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DEFAULT_WINDOW = 65535
MAX_WINDOW = (1 << 31) - 1
DEFAULT_MAX_FRAME = 16384
LARGEST_MAX_FRAME = (1 << 24) - 1
MAX_STREAM = (1 << 31) - 1

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY = range(8)
WINDOW_UPDATE, CONTINUATION = 8, 9

END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
WITH_PRIORITY = 0x20


class H2ErrorCode(enum.IntEnum):
    """Error codes of streams and connections (RFC 9113 section 7)."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11
    INADEQUATE_SECURITY = 12
    HTTP_1_1_REQUIRED = 13


class Setting(enum.IntEnum):
    """Identifiers of settings (RFC 9113 section 6.5.2)."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


class H2ConnectionError(Exception):
    """Raised when the client breaks a rule of the connection; the text goes into GOAWAY."""

    def __init__(self, code: H2ErrorCode, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


FRAME_HEADER = struct.Struct(">HBBBI")
"""A frame header: length (upper 16 and lower 8 of 24 bits), kind, flags, stream."""

FRAME_HEADER_SIZE = FRAME_HEADER.size
_SETTING = struct.Struct(">HI")
_NUMBER = struct.Struct(">I")
_TWO_NUMBERS = struct.Struct(">II")


def frame_header(length: int, kind: int, flags: int, stream: int) -> bytes:
    """Encodes the header of a frame with a payload of `length` bytes."""
    return FRAME_HEADER.pack(length >> 8, length & 255, kind, flags, stream)


def settings(values: dict[Setting, int]) -> bytes:
    """Encodes a SETTINGS frame."""
    payload = b"".join(_SETTING.pack(*item) for item in values.items())
    return frame_header(len(payload), SETTINGS, 0, 0) + payload


SETTINGS_ACK = frame_header(0, SETTINGS, ACK, 0)


def ping(data: bytes, ack: bool) -> bytes:
    """Encodes a PING frame with eight bytes of data."""
    return frame_header(8, PING, ACK if ack else 0, 0) + data


def window_update(stream: int, increment: int) -> bytes:
    """Encodes a WINDOW_UPDATE frame; stream 0 is the connection."""
    return frame_header(4, WINDOW_UPDATE, 0, stream) + _NUMBER.pack(increment)


def rst_stream(stream: int, code: H2ErrorCode) -> bytes:
    """Encodes a RST_STREAM frame."""
    return frame_header(4, RST_STREAM, 0, stream) + _NUMBER.pack(code)


def goaway(last_stream: int, code: H2ErrorCode, text: str = "") -> bytes:
    """Encodes a GOAWAY frame; streams after `last_stream` were not processed."""
    payload = _TWO_NUMBERS.pack(last_stream, code) + text.encode("ascii", "replace")
    return frame_header(len(payload), GOAWAY, 0, 0) + payload


def headers(stream: int, block: bytes, end_stream: bool, max_frame: int) -> bytes:
    """Encodes a header block as HEADERS and, if it is long, CONTINUATION frames."""
    flags = END_STREAM if end_stream else 0
    if len(block) <= max_frame:
        return frame_header(len(block), HEADERS, flags | END_HEADERS, stream) + block
    parts = [block[start : start + max_frame] for start in range(0, len(block), max_frame)]
    frames = [frame_header(len(parts[0]), HEADERS, flags, stream), parts[0]]
    for part in parts[1:]:
        last = END_HEADERS if part is parts[-1] else 0
        frames += (frame_header(len(part), CONTINUATION, last, stream), part)
    return b"".join(frames)


MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of each connection; sizes in bytes, times in seconds (`idle_timeout` 0: no limit).

    A rate is the number of frames that may arrive at once, and how many may follow per second.
    """

    # INT32_MAX (docs/reference/grpc.md, "ModelInferResponse")
    max_message_size: int = 2147483647
    max_streams: int = 4096
    stream_window: int = 8 * MIB  # a request of 4 MiB needs no WINDOW_UPDATE
    connection_window: int = 64 * MIB
    max_frame: int = MIB
    max_send_queue: int = 256 * 1024  # pending bytes of a stream before its writer pauses
    write_buffer: int = MIB  # bytes in the transport before writing pauses
    max_header_list: int = 16384  # gRPC's own limit; more is RESOURCE_EXHAUSTED
    header_list_hard_limit: int = 65536  # a longer list closes the connection
    max_header_block: int = 32768  # compressed, including CONTINUATION frames
    max_continuations: int = 16
    max_turn_cost: int = 16384  # bytes of header blocks in a turn of the loop; a request adds 256
    reset_rate: tuple[int, int] = (4096, 200)  # streams that the client resets or breaks a rule on
    no_op_frame_rate: tuple[int, int] = (1000, 100)  # PING, SETTINGS, PRIORITY, empty DATA, ...
    max_unsent_control: int = 65536  # answers to control frames that the client does not read
    handshake_timeout: float = 20.0  # for TLS, and again for the first SETTINGS
    data_rate_interval: float = 60.0  # an incomplete message or frame must bring
    min_interval_bytes: int = 16384  # this many bytes in each interval
    idle_timeout: float = 0.0  # without open streams
    linger_timeout: float = 5.0  # for the last bytes to reach the client
