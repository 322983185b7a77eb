"""An HTTP/1.1 server for ASGI applications, with limits on size, time and memory."""
