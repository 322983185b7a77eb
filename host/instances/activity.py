"""What an instance does now."""

from __future__ import annotations

import msgspec

from host.crashes.record import DescribedRequest


class InstanceActivity(msgspec.Struct, frozen=True):
    """What one instance does.

    `phase`, `request_count` and `requests` are as in CrashRecord, of the requests that run now.
    `stacks`: lines with the Python stacks of all threads, the main thread first. `problem`: why
    there are none, "" if there are.
    """

    model: str
    version: int
    instance: str
    pid: int
    phase: str
    request_count: int
    requests: list[DescribedRequest]
    stacks: list[str]
    problem: str
