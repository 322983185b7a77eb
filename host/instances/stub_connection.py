"""The connection to one stub, with the state of its protocol."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from host.instances.busy_polling import BusyPoller
from host.instances.channel import Channel
from host.instances.link import Link, ReclaimedFrame
from stub.wire import messages as m
from stub.wire.session import Session, State

_CLOSED_STATES = (State.ERROR, State.ENDED)


class StubConnection:
    """Sends messages, and follows the state of the stub.

    Work and messages of the service for a stub that is gone are dropped. `on_error`: as for `Link`.
    Raises OSError; methods that send raise ProtocolError for a message that the state forbids.
    """

    def __init__(
        self, channel: Channel, busy_poller: BusyPoller, on_error: Callable[[Exception], None]
    ) -> None:
        self.session = Session()
        self.link = Link(channel, busy_poller, on_error)

    def send_work(
        self, messages: Sequence[m.ToStub], reclaimed: ReclaimedFrame | None = None
    ) -> None:
        """Sends a frame to the stub's main thread; `reclaimed` is as for `Link.send_work`."""
        session = self.session
        if session.state in _CLOSED_STATES:
            return
        for message in messages:
            session.advance(message)
        self.link.send_work(messages, reclaimed)

    def send_service(self, messages: Sequence[m.ToStub]) -> None:
        """Sends a frame to the stub's service thread."""
        if self.session.state in _CLOSED_STATES:
            return
        for message in messages:
            self.session.advance(message)
        self.link.send_service(messages)

    def notify(self, message: m.ToStub) -> None:
        """Sends one message to the stub's service thread."""
        self.send_service([message])

    def send_bls_responses(self, messages: Sequence[m.ToStub]) -> None:
        """Sends a frame of BLS responses to the thread of the stub that reads them."""
        for message in messages:
            self.session.advance(message)
        self.link.send_bls_responses(messages)

    def mark_failed(self) -> None:
        """Stops sending and reading."""
        self.session.state = State.ERROR
        self.link.stop_reading()
