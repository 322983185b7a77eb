"""The HTTP/REST frontend: an ASGI application (docs/reference/protocol.md, "HTTP/REST (default port
8000)").
"""
