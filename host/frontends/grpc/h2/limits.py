"""Limits of an HTTP/2 connection."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of each connection; sizes in bytes, times in seconds (`idle_timeout` 0: no limit).

    A rate is the number of frames that may arrive at once, and how many may follow per second.
    """

    # INT32_MAX (docs/reference/protocol.md, "ModelInferResponse")
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
