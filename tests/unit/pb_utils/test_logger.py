"""The logger, and its lines on stderr without a server."""

from __future__ import annotations

import os
import re
import sys
from typing import Any

import pytest

from pb_utils import Logger
from tests.unit.pb_utils.recording import RecordingRuntime


def test_levels_have_their_values() -> None:
    assert [Logger.INFO, Logger.WARNING, Logger.ERROR, Logger.VERBOSE] == [0, 1, 2, 3]
    assert Logger.LogLevel.ERROR is Logger.ERROR


def test_every_method_logs_at_its_level_from_the_callers_position(
    runtime: RecordingRuntime,
) -> None:
    line = sys._getframe().f_lineno
    Logger.log_info("i")
    Logger.log_warn("w")
    Logger.log_warning("also w")
    Logger.log_error("e")
    Logger.log_verbose("v")
    Logger.log("default")
    Logger.log("explicit", Logger.ERROR)
    Logger.log(level=Logger.VERBOSE, message="keywords")
    assert runtime.lines == [
        (level, "test_logger.py", line + index + 1, message)
        for index, (level, message) in enumerate(
            [
                (0, "i"),
                (1, "w"),
                (1, "also w"),
                (2, "e"),
                (3, "v"),
                (0, "default"),
                (2, "explicit"),
                (3, "keywords"),
            ]
        )
    ]
    assert all(type(level) is int for level, *_ in runtime.lines)


def test_messages_may_be_bytes_and_are_always_valid_text(runtime: RecordingRuntime) -> None:
    Logger.log_info(message=b"raw \xff")
    Logger.log_info("file \udcff")
    assert [message for *_, message in runtime.lines] == [r"raw \xff", r"file \udcff"]


@pytest.mark.parametrize("message", [None, 1])
@pytest.mark.parametrize(
    "name", ["log", "log_info", "log_warn", "log_warning", "log_error", "log_verbose"]
)
def test_a_message_must_be_text(runtime: RecordingRuntime, name: str, message: Any) -> None:
    with pytest.raises(TypeError, match=rf"^{name}\(\): incompatible function arguments\."):
        getattr(Logger, name)(message)
    assert runtime.lines == []


@pytest.mark.parametrize("level", [None, 1, "INFO"])
def test_level_must_be_a_log_level(runtime: RecordingRuntime, level: Any) -> None:
    with pytest.raises(TypeError, match=r"^log\(\): incompatible function arguments\."):
        Logger.log("m", level)


def test_logger_cannot_be_instantiated() -> None:
    with pytest.raises(TypeError):
        Logger()


@pytest.mark.parametrize(
    ("name", "letter"),
    [("log_info", "I"), ("log_warn", "W"), ("log_error", "E"), ("log_verbose", "I")],
)
def test_without_a_host_lines_go_to_stderr(
    capsys: pytest.CaptureFixture[str], name: str, letter: str
) -> None:
    getattr(Logger, name)("Info Msg!")
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(
        rf"{letter}\d{{4}} \d\d:\d\d:\d\d\.\d{{6}} {os.getpid()} "
        r"test_logger\.py:\d+\]  Info Msg!\n",
        err,
    )
