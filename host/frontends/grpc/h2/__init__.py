"""A small gRPC server on asyncio, with its own HTTP/2 (RFC 9113) and HPACK (RFC 7541).

`frames`, `reader`, `hpack`, `headers`, `send_buffer`, `h2_stream`, `connection_policy` and
`h2_connection` implement HTTP/2; `grpc_messages`, `calls`, `unary_call` and `stream_call` implement
gRPC; `frontend` listens.
"""
