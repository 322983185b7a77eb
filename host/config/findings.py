"""The result of configuration checks, and the error made from the first finding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeAlias

from host.config.source import ConfigSource
from host.errors import ErrorCode, HostError


class Finding(NamedTuple):
    """One problem of a configuration: its error text, and the path of the field.

    `advice` says what to do, if the text, which may be Triton's, does not.
    """

    text: str
    field: str
    code: ErrorCode = ErrorCode.INVALID_ARG
    advice: str = ""


Findings: TypeAlias = Iterator[Finding]


def raise_first(findings: Iterable[Finding], source: ConfigSource | None) -> None:
    """Raises the first finding, if any, as HostError. The text ends with its place in `source`."""
    error = first_error(findings, source)
    if error is not None:
        raise error


def first_error(findings: Iterable[Finding], source: ConfigSource | None) -> HostError | None:
    """The error that `raise_first` would raise."""
    for finding in findings:
        place = source.format_location(finding.field) if source is not None else ""
        text = finding.text + place
        if finding.advice:
            text += _after(text, finding.advice)
        return HostError(finding.code, text)
    return None


def _after(text: str, advice: str) -> str:
    return f" {advice[:1].upper()}{advice[1:]}" if text.endswith(".") else f"; {advice}"
