"""Errors of bound functions, for the authors of the functions."""

from __future__ import annotations


class BindError(Exception):
    """Base of all errors of this package. The text says what failed and what to do."""


class BadSpecError(BindError, ValueError):
    """The description of a model, or an argument of a decorator, cannot be used."""


class BadCallError(BindError, ValueError):
    """A decorator cannot process the requests, or the outputs of a function are invalid."""


class HostFailure(BindError):
    """The host could not start, refused a model, or has exited."""


class UnrecoverableError(BindError):
    """Raised by a function after which no call can succeed.

    The client gets the text. From then on, the model is not ready and refuses all requests.
    """
