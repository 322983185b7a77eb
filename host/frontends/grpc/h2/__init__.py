"""A lean gRPC server on asyncio: HTTP/2 (RFC 9113) by hand, HPACK by a library.

`frames`, `reader`, `headers`, `stream` and `connection` speak HTTP/2 and know nothing of gRPC;
`messages`, `status`, `route` and `calls` are gRPC; `frontend` listens.
"""
