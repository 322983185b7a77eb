"""The reports of `pbhost bench`: a table, CSV or JSON."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from host.load_generator.job import Protocol
from host.load_generator.measurement import (
    QUANTILES,
    Measurement,
    Plan,
    ServerCounts,
    mean,
    quantile,
)
from host.logs.formats import escape_control_characters


def format_milliseconds(seconds: float) -> str:
    """Formats a time for a table; "-" if it is not known."""
    if math.isnan(seconds):
        return "-"
    number = 1000 * seconds
    return f"{number:.3f}" if number < 1 else f"{number:.2f}" if number < 100 else f"{number:.0f}"


def format_rate(number: float) -> str:
    """Formats a number of requests per second for a table."""
    return f"{number:.1f}" if number < 1000 else f"{number:.0f}"


_STREAMED = (Protocol.GRPC_STREAM, Protocol.HTTP_EVENTS)
_SHOWN = {
    Protocol.GRPC: "gRPC",
    Protocol.GRPC_STREAM: "gRPC streams",
    Protocol.HTTP: "HTTP",
    Protocol.HTTP_EVENTS: "HTTP with server-sent events",
}


def _to_row(found: Measurement) -> dict[str, Any]:
    """The figures of a level, by name; times are in milliseconds, unknown ones None."""
    sample, server = found.sample, found.server

    def known(number: float) -> float | None:
        return None if math.isnan(number) else round(number, 4)

    def times(name: str, values: Sequence[float]) -> dict[str, float | None]:
        row = {f"{name}_mean_ms": known(1000 * mean(values))}
        for label, share in QUANTILES.items():
            row[f"{name}_{label}_ms"] = known(1000 * quantile(values, share))
        return row

    row: dict[str, Any] = {
        "concurrency": found.level.concurrency or None,
        "rate": found.level.rate or None,
        "requests": len(sample.latencies),
        "failed": found.failed,
        "seconds": round(sample.seconds, 4),
        "requests_per_second": known(found.rate),
        "responses_per_second": known(sample.responses / (sample.seconds or math.nan)),
        **times("latency", sample.latencies),
        **times("first", sample.first),
        **times("gap", sample.gaps),
        **times("lateness", sample.lateness),
    }
    names = ("queue", "compute_input", "compute_infer", "compute_output")
    for name in names:
        row[f"server_{name}_ms"] = server and known(1000 * server.mean(name))
    row["server_batch"] = server and known(server.batch)
    row["client_processes"] = found.processes
    row["client_cpu"] = known(max(sample.cpu, default=math.nan))
    row["client_limit"] = found.client_limit
    row["backlog"] = sample.backlog
    row["stable"] = found.stable
    row["interrupted"] = found.interrupted
    return row


class Report:
    """Prints what was measured."""

    def __init__(self, model: str, protocol: Protocol, plan: Plan) -> None:
        self._model, self._protocol, self._plan = model, protocol, plan

    def add(self, found: Measurement) -> None:
        """Prints a level, or keeps it."""
        raise NotImplementedError

    def finish(self) -> None:
        """Prints what comes after the last level."""


class _TextReport(Report):
    """A table, whose lines are printed as they are measured, and remarks after it."""

    def __init__(self, model: str, protocol: Protocol, plan: Plan) -> None:
        super().__init__(model, protocol, plan)
        self._remarks: list[str] = []
        self._begun = False

    def add(self, found: Measurement) -> None:
        """Prints a line."""
        cells = self._cells(found)
        if not self._begun:
            self._begun = True
            requests, window = self._plan.requests, self._plan.window
            measured = f"{requests} requests" if requests else f"three windows of {window:g} s"
            sys.stdout.write(
                f"model '{self._model}', {_SHOWN[self._protocol]}, {measured}; times in ms\n"
            )
            _print_row({title: title for title in cells})
        _print_row(cells)
        self._remark(found)

    def _cells(self, found: Measurement) -> dict[str, str]:
        sample, level = found.sample, found.level
        cells = (
            {"concurrency": str(level.concurrency)}
            if level.concurrency
            else {"rate": f"{level.rate:g}"}
        )
        cells["requests/s"] = format_rate(found.rate)
        for label, share in QUANTILES.items():
            cells[label] = format_milliseconds(found.latency(share))
        if self._protocol in _STREAMED:
            cells["responses/s"] = format_rate(sample.responses / (sample.seconds or math.nan))
            cells["first p50"] = format_milliseconds(quantile(sample.first, 0.5))
            cells["first p99"] = format_milliseconds(quantile(sample.first, 0.99))
            cells["gap p50"] = format_milliseconds(quantile(sample.gaps, 0.5))
            cells["gap p99"] = format_milliseconds(quantile(sample.gaps, 0.99))
        server = found.server or ServerCounts()
        cells["queue"] = format_milliseconds(server.mean("queue"))
        cells["input"] = format_milliseconds(server.mean("compute_input"))
        cells["infer"] = format_milliseconds(server.mean("compute_infer"))
        cells["output"] = format_milliseconds(server.mean("compute_output"))
        cells["batch"] = "-" if math.isnan(server.batch) else f"{server.batch:.1f}"
        cells["client CPU"] = f"{100 * max(sample.cpu, default=0.0):.0f} %"
        cells["failed"] = str(found.failed)
        return cells

    def _remark(self, found: Measurement) -> None:
        level, sample = found.level, found.sample
        for status, count in sorted(sample.failures.items(), key=lambda pair: -pair[1]):
            text = escape_control_characters(sample.messages.get(status, ""))
            self._remarks.append(f"{level}: {count} failed with {status}: {text}")
        if found.interrupted:
            self._remarks.append(f"{level}: interrupted after {sample.seconds:.1f} s")
        elif not found.stable:
            self._remarks.append(f"{level}: the windows were not stable")
        if found.client_limit:
            self._remarks.append(f"{level}: the client was the limit: {found.client_limit}")
        if sample.backlog:
            self._remarks.append(
                f"{level}: {sample.backlog} requests were due and not sent at the end: all"
                " connections, or streams that the server takes, were in use"
            )
        if found.processes > 1:
            self._remarks.append(f"{level}: sent by {found.processes} processes")

    def finish(self) -> None:
        """Prints the remarks."""
        for remark in self._remarks:
            sys.stdout.write(f"{remark}\n")


def _print_row(cells: Mapping[str, str]) -> None:
    """Prints a line of a table, by the titles of its columns."""
    line = "  ".join(text.rjust(max(len(title), 7)) for title, text in cells.items())
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class _CsvReport(Report):
    """A line for each level, after a line of names."""

    _started = False

    def add(self, found: Measurement) -> None:
        """Prints a line."""
        row = _to_row(found)
        text = io.StringIO()
        writer = csv.DictWriter(text, list(row), lineterminator="\n")
        if not self._started:
            writer.writeheader()
            self._started = True
        writer.writerow(row)
        sys.stdout.write(text.getvalue())
        sys.stdout.flush()


class _JsonReport(Report):
    """One document with all levels."""

    def __init__(self, model: str, protocol: Protocol, plan: Plan) -> None:
        super().__init__(model, protocol, plan)
        self._levels: list[dict[str, Any]] = []

    def add(self, found: Measurement) -> None:
        """Keeps a level."""
        sample = found.sample
        failures: Mapping[str, Any] = {
            status: {"count": count, "message": sample.messages.get(status, "")}
            for status, count in sample.failures.items()
        }
        self._levels.append({**_to_row(found), "failures": failures})

    def finish(self) -> None:
        """Prints the document."""
        shown = {"model": self._model, "protocol": _SHOWN[self._protocol], "levels": self._levels}
        sys.stdout.write(f"{json.dumps(shown, indent=2)}\n")


REPORTS: Mapping[str, type[Report]] = {"text": _TextReport, "csv": _CsvReport, "json": _JsonReport}
