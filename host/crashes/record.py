"""The record of one death of a stub."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timezone

import msgspec

from host.inference.request import InferRequest
from host.recording.format import to_valid_text

_MAX_REQUESTS = 32
_FIRST_LINE_OF_STACKS = "Fatal Python error: "
_LINE_AFTER_STACKS = "Extension modules: "


class DescribedTensor(msgspec.Struct, frozen=True):
    """An input of a request: its name, datatype and shape, not its content."""

    name: str
    datatype: str
    shape: list[int]


class DescribedRequest(msgspec.Struct, frozen=True):
    """A request that runs, or ran when the stub died."""

    id: str
    inputs: list[DescribedTensor]


class CrashRecord(msgspec.Struct, frozen=True):
    """One death of a stub.

    `time`: RFC 3339, in UTC. `reason`: a sentence. `signal`: its name, "" if no signal ended the
    process; `status`: its exit status otherwise. `phase`: what the stub was doing. `requests`: the
    first of those that ran; `request_count` counts all of them. `stacks`: the Python stacks of all
    threads, empty if nothing could write them, as after SIGKILL. `output`: the last lines that the
    model printed or logged. `recorded_requests`: of how many requests the tensors are in the folder
    beside the record's file.
    """

    id: str
    time: str
    model: str
    version: int
    instance: str
    pid: int
    reason: str
    signal: str
    status: int | None
    phase: str
    request_count: int
    requests: list[DescribedRequest]
    stacks: list[str]
    output: list[str]
    recorded_requests: int = 0


class CrashSummary(msgspec.Struct, frozen=True):
    """What a list shows of a record; the fields are those of CrashRecord."""

    id: str
    time: str
    model: str
    version: int
    instance: str
    reason: str


def summarize(record: CrashRecord) -> CrashSummary:
    """What a list shows of a record."""
    return CrashSummary(
        record.id, record.time, record.model, record.version, record.instance, record.reason
    )


def format_time(moment: datetime) -> str:
    """A time with a time zone, as RFC 3339 in UTC with milliseconds."""
    utc = moment.astimezone(timezone.utc)
    return utc.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def describe_requests(requests: Iterable[InferRequest]) -> list[DescribedRequest]:
    """The first requests, without the content of their tensors."""
    described: list[DescribedRequest] = []
    for request in requests:
        if len(described) == _MAX_REQUESTS:
            break
        tensors = [DescribedTensor(t.name, t.datatype, list(t.shape)) for t in request.inputs]
        described.append(DescribedRequest(to_valid_text(request.id), tensors))
    return described


def find_stacks(output: list[str]) -> list[str]:
    """The lines that `faulthandler` wrote at a fatal signal; empty if it has not."""
    starts = [n for n, line in enumerate(output) if line.startswith(_FIRST_LINE_OF_STACKS)]
    if not starts:
        return []
    lines = output[starts[-1] :]
    ends = (n for n, line in enumerate(lines) if line.startswith(_LINE_AFTER_STACKS))
    lines = lines[: next(ends, len(lines))]
    while lines and not lines[-1].strip():
        lines.pop()
    return lines
