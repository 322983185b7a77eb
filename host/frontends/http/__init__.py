"""The HTTP/REST frontend: an ASGI application (docs/reference/protocol.md, 1)."""
