"""The HTTP/REST frontend: an ASGI application (docs/reference/http.md, "HTTP/REST (default port
8000)").
"""
