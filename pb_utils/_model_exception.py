"""The exception of the API."""


class TritonModelException(Exception):
    """A call of the API failed, or a model rejects a request.

    All calls of the API raise it, unless their description names another one. ``str(error)`` is the
    message.
    """
