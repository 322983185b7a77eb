"""The exception that every call of the API raises unless its description says otherwise."""


class TritonModelException(Exception):
    """A call of the API failed, or a model refuses a request; ``str(error)`` is the message."""
