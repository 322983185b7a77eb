"""Whether a server accepts requests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ServerState:
    """The progress of a server between its start and its exit."""

    started: bool = False
    """Start-up is complete."""

    failed: bool = False
    """The start has failed, and the server runs without models (`--exit-on-error=false`)."""

    exiting: bool = False
    """The exit has started. Health requests fail; other requests are served until it is over."""

    @property
    def accepts_model_control(self) -> bool:
        """Whether start-up is complete and the exit has not started."""
        return self.started and not self.exiting
