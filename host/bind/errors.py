"""What goes wrong around bound functions, for their authors to read."""

from __future__ import annotations


class BindError(Exception):
    """Something that a program with bound functions must see. `str()` says what, and what to do."""


class BadSpecError(BindError, ValueError):
    """The description of a model, or an argument of a decorator, cannot be used."""


class BadCallError(BindError, ValueError):
    """Requests that a decorator cannot work with, or outputs that are not as they must be."""


class HostFailure(BindError):
    """The host could not be started, refused a model, or has ended."""


class UnrecoverableError(BindError):
    """For functions to raise: no later call can succeed, so the model must not be asked again.

    The caller gets the text; the model is not ready from then on, and refuses what comes.
    """
