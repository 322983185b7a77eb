"""What a model writes with Python's own `logging`, taken to the host's log."""

import logging

from pb_utils import _runtime

_ERROR, _WARNING, _INFO, _VERBOSE = 2, 1, 0, 3
"""Levels as in pb_utils spec 3.12."""


class HostHandler(logging.Handler):
    """Passes records on as `pb_utils.Logger` does, with the place that they come from."""

    def emit(self, record: logging.LogRecord) -> None:
        """Send one record; the host decides whether it is shown."""
        try:
            text = self.format(record)
            _runtime.current().log(_level(record.levelno), record.filename, record.lineno, text)
        except Exception:  # as the standard handlers: a log that fails must not fail its writer
            self.handleError(record)


def _level(number: int) -> int:
    if number >= logging.ERROR:
        return _ERROR
    if number >= logging.WARNING:
        return _WARNING
    return _INFO if number >= logging.INFO else _VERBOSE


def install() -> None:
    """Have the host's log take what nobody else does, from level INFO on.

    It stands in for the handler of last resort, not among those of the root logger: a model that
    configures `logging` itself, by `basicConfig` or in another way, gets what it asks for.
    """
    handler = HostHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logging.lastResort = handler
    logging.getLogger().setLevel(logging.INFO)
