"""What one connection may ask of the server."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Bounds of every connection; sizes in bytes, times in seconds (`idle_timeout` 0: no limit).

    A frame limit is a number that may come at once and a number per second that may follow.
    """

    max_message_size: int = 2147483647  # INT32_MAX, each way (protocol spec 2.4)
    max_streams: int = 4096
    stream_window: int = 8 * MIB  # a request of 4 MiB comes without a pause
    connection_window: int = 64 * MIB
    max_frame: int = MIB
    max_send_queue: int = 256 * 1024  # of a stream: what `Send` may leave before it has to wait
    write_buffer: int = MIB  # of a transport, before streams keep their bytes
    max_header_list: int = 16384  # gRPC's own limit; more is RESOURCE_EXHAUSTED
    header_list_hard_limit: int = 65536  # more than this ends the connection
    max_header_block: int = 32768  # compressed, with all its CONTINUATION frames
    max_continuations: int = 16
    reset_rate: tuple[int, int] = (4096, 200)  # requests begun only to be cancelled
    no_op_frame_rate: tuple[int, int] = (1000, 100)  # PING, SETTINGS, PRIORITY, empty DATA, ...
    max_unsent_control: int = 65536  # answers to such frames that the client does not read
    handshake_timeout: float = 20.0  # of TLS, and then until the client's first SETTINGS
    data_rate_interval: float = 60.0  # in which a message, or a frame, that has begun must bring
    min_interval_bytes: int = 16384  # bytes, unless it is complete
    idle_timeout: float = 0.0  # without any stream
    linger_timeout: float = 5.0  # for the last bytes of a connection to leave
