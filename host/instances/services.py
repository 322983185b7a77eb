"""What instances need of the host around them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from host.inference import Call, InferRequest
from host.instances.arenas import Arenas
from host.instances.channel import Channel
from host.instances.process import Launcher

if TYPE_CHECKING:
    from host.instances.instance import Instance


class HostServices(Protocol):
    """What an instance needs of the host around it."""

    channel: Channel
    arenas: Arenas
    launcher: Launcher

    def ask(self, request: InferRequest) -> Call:
        """Start a BLS request of a model. Raises HostError if it cannot be started."""

    def break_circle(self, call: Call) -> None:
        """Fail a blocking BLS call that could only go on after itself."""

    def model_log(self, label: str, level: int, file: str, line: int, text: str) -> None:
        """Log what a model logged, level as in pb_utils spec 3.12."""

    def printed(self, label: str, line: str, error: bool) -> None:
        """Log what a stub printed."""

    def gone(self, instance: Instance) -> None:
        """The instance's process has ended."""
