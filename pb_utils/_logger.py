"""The logger that writes to the server's log."""

from __future__ import annotations

import os.path
import sys
from types import FrameType
from typing import ClassVar

from pb_utils import _arguments, _runtime
from pb_utils._exceptions import NamedInt, SuggestingType


class Logger(metaclass=SuggestingType):
    """Writes messages to the server's log.

    The server's log settings decide which levels are written. The log shows the file and the line
    of the caller. A message is a str, bytes or bytearray; the log shows bytes that are not valid
    UTF-8 as escapes (docs/reference/model-module.md, "Logger").

    Attributes:
        INFO: level of ordinary messages.
        WARNING: level of warnings.
        ERROR: level of errors.
        VERBOSE: level of debugging messages; needs ``log_verbose_level`` 1 or more.

    Examples:
        >>> pb_utils.Logger.log_info("loaded the weights")
    """

    class LogLevel(NamedInt):
        """The level of a message."""

        INFO = 0
        WARNING = 1
        ERROR = 2
        VERBOSE = 3

    INFO: ClassVar[LogLevel] = LogLevel.INFO
    WARNING: ClassVar[LogLevel] = LogLevel.WARNING
    ERROR: ClassVar[LogLevel] = LogLevel.ERROR
    VERBOSE: ClassVar[LogLevel] = LogLevel.VERBOSE

    def __init__(self) -> None:
        """Always raises: all methods are static.

        Raises:
            TypeError: always.
        """
        raise TypeError("c_python_backend_utils.Logger: No constructor defined!")

    @staticmethod
    @_arguments.with_argument_errors
    def log(message: str | bytes | bytearray, level: LogLevel = LogLevel.INFO) -> None:
        """Writes a message at a level.

        Args:
            message: the text.
            level: ``Logger.INFO``, ``Logger.WARNING``, ``Logger.ERROR`` or ``Logger.VERBOSE``.

        Raises:
            TypeError: ``message`` is not text, or ``level`` is not a ``Logger.LogLevel``. A plain
                number is not accepted.
        """
        _arguments.check_instance("log", "level", level, Logger.LogLevel)
        _emit("log", level, message, sys._getframe(2))

    @staticmethod
    @_arguments.with_argument_errors
    def log_info(message: str | bytes | bytearray) -> None:
        """Writes a message at level INFO.

        Raises:
            TypeError: ``message`` is not text.
        """
        _emit("log_info", Logger.INFO, message, sys._getframe(2))

    @staticmethod
    @_arguments.with_argument_errors
    def log_warn(message: str | bytes | bytearray) -> None:
        """Writes a message at level WARNING.

        Raises:
            TypeError: ``message`` is not text.
        """
        _emit("log_warn", Logger.WARNING, message, sys._getframe(2))

    @staticmethod
    @_arguments.with_argument_errors
    def log_warning(message: str | bytes | bytearray) -> None:
        """Writes a message at level WARNING, as ``log_warn`` does. Triton has only ``log_warn``.

        Raises:
            TypeError: ``message`` is not text.
        """
        _emit("log_warning", Logger.WARNING, message, sys._getframe(2))

    @staticmethod
    @_arguments.with_argument_errors
    def log_error(message: str | bytes | bytearray) -> None:
        """Writes a message at level ERROR.

        Raises:
            TypeError: ``message`` is not text.
        """
        _emit("log_error", Logger.ERROR, message, sys._getframe(2))

    @staticmethod
    @_arguments.with_argument_errors
    def log_verbose(message: str | bytes | bytearray) -> None:
        """Writes a message at level VERBOSE; needs ``log_verbose_level`` 1 or more.

        Raises:
            TypeError: ``message`` is not text.
        """
        _emit("log_verbose", Logger.VERBOSE, message, sys._getframe(2))


def _emit(function: str, level: Logger.LogLevel, message: object, caller: FrameType) -> None:
    text = _arguments.check_message(function, "message", message)
    filename = os.path.basename(caller.f_code.co_filename)
    _runtime.current().log(int(level), filename, caller.f_lineno, text)
