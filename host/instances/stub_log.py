"""The log lines and the output of one stub."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from host.inference.call import Call
from host.instances.services import HostServices
from host.logs.formats import Label
from stub.wire.log_budget import LogBudget
from stub.wire.messages import LogLine

_LOG_BUDGET_FACTOR = 2  # more than the stub allows, as lines may arrive in bursts
_LAST_LINES, _LINE_LENGTH = 200, 1000  # of the output, kept for the record of a crash


class StubLog:
    """Logs lines under `label`, and keeps the last ones for the record of a crash."""

    def __init__(self, label: Label, services: HostServices) -> None:
        self.label = label
        self._services = services
        self._budget = LogBudget(factor=_LOG_BUDGET_FACTOR)
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)

    @property
    def last_lines(self) -> list[str]:
        """The last lines, cut to a limited length."""
        return list(self._last_lines)

    def log_line(self, line: LogLine, calls: Sequence[Call] = ()) -> None:
        """Logs a line about these calls, if there are any."""
        self._last_lines.append(line.text[:_LINE_LENGTH])
        self._services.log_model_line(self.label, line, calls)

    def log_text(self, level: int, text: str) -> None:
        """Logs a text of the host about the stub; levels are those of `pb_utils.Logger`."""
        self.log_line(LogLine(level, "instance.py", 0, text))

    def log_warning(self, text: str) -> None:
        """Logs a warning about the whole model."""
        label = Label(self.label.model, self.label.version)
        self._services.log_model_line(label, LogLine(1, "instance.py", 0, text))

    def log_model_line(self, line: LogLine, calls: Sequence[Call]) -> None:
        """Logs a line of the model, or drops it if the model bypasses the limit of its stub."""
        if self._budget.admit(len(line.text) + len(line.file)):
            self.log_line(line, calls)
        self.report_dropped_lines()

    def report_dropped_lines(self, at_once: bool = False) -> None:
        """Logs how many lines were dropped; once a second at most, unless it is wanted now."""
        report = self._budget.report(at_once)
        if report:
            self.log_text(1, report)

    def log_output(self, line: str, error: bool) -> None:
        """Logs a line that the stub printed."""
        self._last_lines.append(line[:_LINE_LENGTH])
        self._services.log_stub_output(self.label, line, error)
