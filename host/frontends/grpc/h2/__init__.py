"""A small gRPC server on asyncio, with its own HTTP/2 (RFC 9113); HPACK is a library.

`frames`, `reader`, `headers`, `send_buffer`, `stream`, `timers`, `abuse_limits` and `connection`
implement HTTP/2 and do not read gRPC messages; `messages`, `status`, `rpc`, `route` and `calls`
implement gRPC; `frontend` listens.
"""
