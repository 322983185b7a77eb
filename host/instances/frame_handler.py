"""Acts on the frames of one stub."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from host.instances.batch_tracker import Action, BatchTracker
from host.instances.bls_requests import BlsRequest, BlsRequests
from host.instances.bls_transfer import BlsTransfer
from host.instances.stub_log import StubLog
from host.instances.transfer import TensorTransfer
from stub.wire import messages as m
from stub.wire.session import ProtocolError, Session, State

_log = logging.getLogger("pbhost")


class FrameHandler:
    """Decodes frames, and passes each message on.

    `handlers`: by type, for messages about neither batches nor BLS requests. `on_fault`: called if
    a frame breaks the protocol. `on_failure`: called if a message is lost by a defect of the host.
    """

    def __init__(
        self,
        session: Session,
        transfer: TensorTransfer,
        batches: BatchTracker,
        bls_requests: BlsRequests,
        bls_transfer: BlsTransfer,
        handlers: Mapping[type, Callable[[Any], None]],
        log: StubLog,
        on_fault: Callable[[Exception], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        self._session = session
        self._transfer = transfer
        self._batches = batches
        self._bls_requests = bls_requests
        self._bls_transfer = bls_transfer
        self._handlers = handlers
        self._log = log
        self._on_fault = on_fault
        self._on_failure = on_failure

    def handle_frame(self, frame: bytes) -> None:
        """Decodes a whole frame, then acts on it.

        The instance gets its next batch before a single response is delivered. Several responses
        are delivered before that, as their callers may send calls for that batch. Messages before
        one that breaks the protocol take effect, so that no call is lost.
        """
        try:
            messages = m.decode_to_host(frame)
            if self._session.state is State.SERVING and self._handle_frequent(messages):
                return
            reports, releases, responses, settlements = (list[Action]() for _ in range(4))
            try:
                for message in messages:
                    self._session.advance(message)
                    if isinstance(message, m.Response):
                        responses.append(self._batches.handle_response(message))
                    elif isinstance(message, m.BatchDone):
                        report, release, settlement = self._batches.handle_batch_done(message)
                        reports.append(report)
                        releases.append(release)
                        settlements.append(settlement)
                    elif isinstance(message, m.BlsRequest):
                        request = self._decode_bls_request(message)
                        responses.append(partial(self._bls_requests.start_request, request))
                    elif isinstance(message, m.InstanceReleased):
                        releases.append(self._batches.handle_released(message))
                    elif isinstance(message, m.BatchReturned):
                        settlements.append(self._batches.handle_returned(message))
                    else:
                        self._handlers[type(message)](message)
            finally:
                if len(responses) > 1:
                    releases, responses = responses, releases
                for action in (*reports, *releases, *responses, *settlements):
                    self.run_action(action)
        except (msgspec.DecodeError, ProtocolError, KeyError, ValueError, IndexError) as error:
            self._on_fault(error)
        except Exception as error:  # a defect of ours
            self._on_failure(error)

    def _handle_frequent(self, messages: Sequence[m.ToHost]) -> bool:
        """Acts on the most frequent frames of a serving stub, at a fraction of the cost.

        Returns False for other frames, without an effect. Raises as `handle_frame` expects.
        """
        if len(messages) == 1:
            message = messages[0]
            if type(message) is m.BlsRequest:
                request = self._decode_bls_request(message)
                self.run_action(partial(self._bls_requests.start_request, request))
                return True
            if type(message) is m.BlockRelease:
                self._transfer.release_blocks(message)
                return True
            return False
        action = self._batches.handle_single_response(messages)
        if action is None:
            return False
        try:
            if len(messages) == 3 and isinstance(last := messages[2], m.BlockRelease):
                self._transfer.release_blocks(last)
        finally:
            self.run_action(action)
        return True

    def _decode_bls_request(self, message: m.BlsRequest) -> BlsRequest:
        """The request, which was made for all that its batch was made for. Raises as above."""
        made = self._bls_transfer.decode_request(message)
        calls = self._batches.calls_of_batch(message.batch)
        ancestors = [one for call in calls for one in call.request.ancestors]
        if ancestors:
            made.request.ancestors = list(dict.fromkeys(ancestors))
        return made

    def run_action(self, action: Action) -> None:
        """Runs an action; if it fails, the other actions of the frame still run.

        A call whose response cannot be passed on has ended with an error (`Call.respond`).
        """
        try:
            action()
        except Exception:  # a defect of ours
            _log.exception("unexpected failure", extra={"instance": self._log.label})
