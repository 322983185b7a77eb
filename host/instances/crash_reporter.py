"""Records the unexpected end of one stub."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from functools import partial

from host.crashes.quarantine import is_caused_by_request
from host.crashes.records import (
    CrashedRequest,
    CrashRecord,
    CrashRecords,
    describe_requests,
    find_stacks,
    format_time,
)
from host.inference.request import InferRequest
from host.instances.activity import describe_phase
from host.instances.process import name_signal
from host.instances.stub_log import StubLog
from host.instances.stub_session import StubSession
from stub.wire.session import State

_log = logging.getLogger("pbhost")


class CrashReporter:
    """Keeps a record of each crash.

    `on_lethal_request` is called with the request and the record if the stub ran one request, which
    may have ended it.
    """

    def __init__(self, records: CrashRecords, session: StubSession, log: StubLog) -> None:
        self.on_lethal_request: Callable[[InferRequest, CrashRecord], None] = lambda *crash: None
        self._records = records
        self._session = session
        self._log = log

    def record_crash(
        self, pid: int, code: int, reason: str, state: State, out_of_memory: bool
    ) -> None:
        """Records an end with a return code as in `subprocess`, in a state."""
        calls = self._session.started_calls
        requests = [call.request for call in calls]
        record = self._describe(pid, code, reason, state, requests)
        now, decoupled = time.monotonic_ns(), self._session.decoupled
        crashed = [
            CrashedRequest(call.request, decoupled, (now - call.received_ns) / 1e9)
            for call in calls
        ]
        self._run_step(partial(self._records.add, record, crashed))
        # Of several requests, the cause is unknown.
        if len(requests) == 1 and is_caused_by_request(code, out_of_memory):
            self._run_step(partial(self.on_lethal_request, requests[0], record))

    def _run_step(self, step: Callable[[], None]) -> None:
        """Runs a step; if it fails, the others still run."""
        try:
            step()
        except Exception:  # a defect of ours
            _log.exception("unexpected failure", extra={"instance": self._log.label})

    def _describe(
        self, pid: int, code: int, reason: str, state: State, requests: Sequence[InferRequest]
    ) -> CrashRecord:
        now = datetime.now(timezone.utc)
        label, output = self._log.label, self._log.last_lines
        return CrashRecord(
            id=f"{now:%Y%m%dT%H%M%S%f}-{pid}",
            time=format_time(now),
            model=label.model,
            version=label.version,
            instance=label.instance,
            pid=pid,
            reason=reason,
            signal=name_signal(-code) if code < 0 else "",
            status=code if code >= 0 else None,
            phase=describe_phase(state, bool(requests)),
            request_count=len(requests),
            requests=describe_requests(requests),
            stacks=find_stacks(output),
            output=output,
        )
