"""What an instance does now."""

from __future__ import annotations

import msgspec

from host.crashes.records import DescribedRequest
from stub.wire.session import State

_PHASES = {
    State.CONNECTING: "start of the process",
    State.AUTO_COMPLETING: "import or auto_complete_config",
    State.INITIALIZING: "import or initialize",
    State.FINALIZING: "finalize",
}


def describe_phase(state: State, executing: bool) -> str:
    """What a stub does in a state; `executing`: whether it runs requests."""
    return _PHASES.get(state, "execute" if executing else "between requests")


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
