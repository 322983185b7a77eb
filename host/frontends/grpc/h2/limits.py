"""Limits of one HTTP/2 connection."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of each connection; sizes in bytes, times in seconds (`idle_timeout` 0: no limit).

    A rate is a number of frames at once, and a number per second after that.
    """

    max_message_size: int = (
        2147483647  # INT32_MAX, in each direction (docs/reference/protocol.md, 2.4)
    )
    max_streams: int = 4096
    stream_window: int = 8 * MIB  # a request of 4 MiB arrives without a pause
    connection_window: int = 64 * MIB
    max_frame: int = MIB
    max_send_queue: int = 256 * 1024  # of a stream, before `write_message` returns False
    write_buffer: int = MIB  # of a transport, before streams keep their data
    max_header_list: int = 16384  # gRPC's own limit; larger ones are RESOURCE_EXHAUSTED
    header_list_hard_limit: int = 65536  # larger ones end the connection
    max_header_block: int = 32768  # compressed, with all CONTINUATION frames
    max_continuations: int = 16
    reset_rate: tuple[int, int] = (4096, 200)  # requests that are opened only to be cancelled
    no_op_frame_rate: tuple[int, int] = (1000, 100)  # PING, SETTINGS, PRIORITY, empty DATA, ...
    max_unsent_control: int = 65536  # responses to such frames that the client does not read
    handshake_timeout: float = 20.0  # for TLS, and then until the client's first SETTINGS
    data_rate_interval: float = 60.0  # in which a message, or a frame, that has started must bring
    min_interval_bytes: int = 16384  # bytes, unless it is complete
    idle_timeout: float = 0.0  # without a stream
    linger_timeout: float = 5.0  # for the last bytes of a connection to be sent
