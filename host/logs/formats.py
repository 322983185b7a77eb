"""Line formats of the log: Triton's two text formats, and JSON."""

from __future__ import annotations

import json
import logging
import re
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

FORMATS = ("default", "ISO8601", "json")

_CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")


@dataclass(frozen=True, slots=True)
class Label:
    """What a log line is about: an instance, a version or a model."""

    model: str
    version: int = 0
    instance: str = ""

    def __str__(self) -> str:
        model = f"{self.model}:{self.version}" if self.version else self.model
        return f"{model}/{self.instance}" if self.instance else model


def model_fields(model: str, version: int = 0) -> dict[str, object]:
    """The `extra` of a record whose text names the model, and the version, itself."""
    return {"model": model, "version": version}


def format_text(record: logging.LogRecord, log_format: str, escape: bool) -> str:
    """Formats a record as lines of text.

    Source: docs/reference/protocol.md, "Log lines".
    """
    message = record.getMessage()
    if hasattr(record, "printed"):
        return f"[{getattr(record, 'instance', '')}] {message}"
    head = _format_header(record, log_format)
    if hasattr(record, "table"):
        return head + message
    about = _request_prefix(record)
    if about:
        message = f"[{about}] {message}"
    exception = _exception(record)
    if exception:
        message += "\n" + exception
    if not escape:
        return head + message
    first, *more = message.split("\n")
    # Further lines are indented, so that no message can imitate a line of the log.
    lines = [head + json.dumps(first, ensure_ascii=False)]
    return "\n".join(lines + ["  " + escape_control_characters(line) for line in more])


def format_json(record: logging.LogRecord) -> str:
    """Formats a record as one line of JSON; unknown fields are left out."""
    moment, micros = time.gmtime(record.created), int(record.created % 1 * 1e6)
    fields: dict[str, Any] = {
        "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', moment)}.{micros:06}Z",
        "level": _level(record.levelno),
        "pid": record.process,
    }
    if hasattr(record, "printed"):
        fields["stream"] = "stderr" if record.levelno >= logging.WARNING else "stdout"
    else:
        fields["source"] = _source(record)
    label = _label(record)
    model = label.model or getattr(record, "model", "")
    version = label.version or getattr(record, "version", 0)
    requests = _requests(record)
    fields |= {
        key: value
        for key, value in (
            ("model", model),
            ("version", version),
            ("instance", label.instance),
            ("request_id", requests[0] if len(requests) == 1 else ""),
            ("request_ids", requests if len(requests) > 1 else ()),
            ("trace_id", getattr(record, "trace_id", "")),
        )
        if value
    }
    fields["message"] = record.getMessage().strip("\n")
    exception = _exception(record)
    if exception:
        fields["exception"] = exception
    return json.dumps(fields, separators=(",", ":"))


def describe_record(record: logging.LogRecord) -> tuple[str, str]:
    """What a record is about, an instance or a request, and its exception; "" for none."""
    return _request_prefix(record), _exception(record)


def escape_control_characters(text: str) -> str:
    """The text with control characters other than tab and newline escaped."""
    return _CONTROL_CHARACTERS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def _format_header(record: logging.LogRecord, log_format: str) -> str:
    letter = _level(record.levelno)[0].replace("V", "I")
    moment = time.gmtime(record.created)
    if log_format == "ISO8601":
        start = f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', moment)} {letter}"
    else:
        micros = int(record.created % 1 * 1e6)
        start = f"{letter}{time.strftime('%m%d %H:%M:%S', moment)}.{micros:06}"
    return f"{start} {record.process} {_source(record)}] "


def _level(number: int) -> str:
    if number >= logging.ERROR:
        return "ERROR"
    if number >= logging.WARNING:
        return "WARNING"
    return "INFO" if number >= logging.INFO else "VERBOSE"


def _source(record: logging.LogRecord) -> str:
    source: str = getattr(record, "source", "") or f"{record.filename}:{record.lineno}"
    return source


def _label(record: logging.LogRecord) -> Label:
    label = getattr(record, "instance", "")
    return label if isinstance(label, Label) else Label(label)


def _requests(record: logging.LogRecord) -> Sequence[str]:
    requests: Sequence[str] = getattr(record, "requests", ())
    return requests


def _request_prefix(record: logging.LogRecord) -> str:
    """The prefix of a message in brackets: the instance, and the request that it is about.

    Of several requests the first one is named and the others are counted.
    """
    words = [str(_label(record))]
    requests = _requests(record)
    if requests:
        words.append(escape_control_characters(requests[0]).replace("\n", "\\n"))
        if len(requests) > 1:
            words.append(f"+{len(requests) - 1}")
    return " ".join(filter(None, words))


def _exception(record: logging.LogRecord) -> str:
    if not record.exc_info or record.exc_info[0] is None:
        return ""
    return "".join(traceback.format_exception(*record.exc_info)).rstrip()
