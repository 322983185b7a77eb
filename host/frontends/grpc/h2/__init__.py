"""The engine `h2`: a lean gRPC server on asyncio, with HTTP/2 (RFC 9113) of our own.

`frames`, `reader`, `headers`, `stream` and `connection` implement HTTP/2 and know nothing of gRPC;
`messages`, `status`, `route` and `calls` implement gRPC; `frontend` listens.
"""
