"""What a check reports, and how the first report becomes an error that says where to look."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeAlias

from host.config.source import ConfigSource
from host.errors import ErrorCode, HostError


class Finding(NamedTuple):
    """Something wrong with a configuration: the exact text, and the field it is about.

    `advice` says what to do where the text, which is a documented one, does not.
    """

    text: str
    field: str
    code: ErrorCode = ErrorCode.INVALID_ARG
    advice: str = ""


Findings: TypeAlias = Iterator[Finding]


def raise_first(findings: Iterable[Finding], source: ConfigSource | None) -> None:
    """Raise the first finding, if there is one, followed by its place in the source if known."""
    error = first_error(findings, source)
    if error is not None:
        raise error


def first_error(findings: Iterable[Finding], source: ConfigSource | None) -> HostError | None:
    """What `raise_first` would raise."""
    for finding in findings:
        place = source.format_location(finding.field) if source is not None else ""
        advice = f"; {finding.advice}" if finding.advice else ""
        return HostError(finding.code, finding.text + place + advice)
    return None
