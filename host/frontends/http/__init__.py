"""The HTTP/REST door (protocol spec 1): an ASGI application over the core."""
