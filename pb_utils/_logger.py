"""Messages to the server's log."""

from __future__ import annotations

import os.path
import sys
from types import FrameType
from typing import ClassVar

from pb_utils import _arguments, _runtime
from pb_utils._enums import NamedInt


class Logger:
    """Writes to the server's log; the server decides which levels are shown.

    Every message is a str or bytes (what is not UTF-8 is shown as escapes). The position
    that the log shows is the caller's.
    """

    class LogLevel(NamedInt):
        """How important a message is."""

        INFO = 0
        WARNING = 1
        ERROR = 2
        VERBOSE = 3

    INFO: ClassVar[LogLevel] = LogLevel.INFO
    WARNING: ClassVar[LogLevel] = LogLevel.WARNING
    ERROR: ClassVar[LogLevel] = LogLevel.ERROR
    VERBOSE: ClassVar[LogLevel] = LogLevel.VERBOSE

    def __init__(self) -> None:
        """Refuse: all methods are static.

        Raises:
            TypeError: always.
        """
        raise TypeError("c_python_backend_utils.Logger: No constructor defined!")

    @staticmethod
    @_arguments.with_argument_errors
    def log(message: str | bytes | bytearray, level: LogLevel = LogLevel.INFO) -> None:
        """Write a message at a level, one of ``Logger.INFO``, ``WARNING``, ``ERROR``, ``VERBOSE``.

        Raises:
            TypeError: ``message`` is no text, or ``level`` is no level (a plain number is none).
        """
        _arguments.check_instance("log", "level", level, Logger.LogLevel)
        _emit("log", level, message, sys._getframe(2))

    @staticmethod
    @_arguments.with_argument_errors
    def log_info(message: str | bytes | bytearray) -> None:
        """Write a message at level INFO.

        Raises:
            TypeError: ``message`` is no text.
        """
        _emit("log_info", Logger.INFO, message, sys._getframe(2))

    @staticmethod
    @_arguments.with_argument_errors
    def log_warn(message: str | bytes | bytearray) -> None:
        """Write a message at level WARNING.

        Raises:
            TypeError: ``message`` is no text.
        """
        _emit("log_warn", Logger.WARNING, message, sys._getframe(2))

    @staticmethod
    @_arguments.with_argument_errors
    def log_error(message: str | bytes | bytearray) -> None:
        """Write a message at level ERROR.

        Raises:
            TypeError: ``message`` is no text.
        """
        _emit("log_error", Logger.ERROR, message, sys._getframe(2))

    @staticmethod
    @_arguments.with_argument_errors
    def log_verbose(message: str | bytes | bytearray) -> None:
        """Write a message at level VERBOSE, shown if the server's ``log_verbose_level`` is set.

        Raises:
            TypeError: ``message`` is no text.
        """
        _emit("log_verbose", Logger.VERBOSE, message, sys._getframe(2))


def _emit(function: str, level: Logger.LogLevel, message: object, caller: FrameType) -> None:
    text = _arguments.check_message(function, "message", message)
    filename = os.path.basename(caller.f_code.co_filename)
    _runtime.current().log(int(level), filename, caller.f_lineno, text)
