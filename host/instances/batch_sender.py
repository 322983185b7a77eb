"""Sends batches to one stub, and takes back those that it has not started."""

from __future__ import annotations

import asyncio
import logging

from host.errors import HostError, unavailable, unexpected_failure
from host.inference.call import Call
from host.instances.batch import Batch
from host.instances.batch_tracker import BatchTracker
from host.instances.block_releases import arena_full_error
from host.instances.channel import WORK
from host.instances.stub_connection import StubConnection
from host.instances.stub_log import StubLog
from host.instances.transfer import TensorTransfer
from stub.wire import messages as m
from stub.wire.arena import ArenaFull
from stub.wire.payload import WireRequest

_log = logging.getLogger("pbhost")


class BatchSender:
    """Encodes the calls of batches, and adds the batches to `batches`."""

    def __init__(
        self,
        connection: StubConnection,
        transfer: TensorTransfer,
        batches: BatchTracker,
        log: StubLog,
    ) -> None:
        self._connection = connection
        self._transfer = transfer
        self._batches = batches
        self._log = log
        self._exit_reason = ""

    def send_batch(self, batch: Batch) -> None:
        """Runs a batch. Calls whose tensors do not fit into memory fail; the others run.

        A batch that may be returned may also be reclaimed. If no call can be sent, the batch ends
        later; but of a prefetched one, the scheduler sees that its calls have failed.
        """
        if self._exit_reason:  # the scheduler does not know yet that the stub has ended
            reason = f"{self._exit_reason} before it had begun with this request."
            for call in batch.calls:
                call.fail(unavailable(reason))
            batch.calls = ()
        frame: list[m.ToStub] = []
        transfer = self._transfer
        requests: list[WireRequest] = []
        calls: list[Call] = []
        failed: list[tuple[Call, HostError]] = []
        batch_requests = len(batch.calls)
        for call in batch.calls:
            try:
                requests.append(transfer.encode_request(call.request, WORK, frame, batch_requests))
            except ArenaFull as full:
                failed.append((call, arena_full_error(full)))
            except Exception as error:  # a defect: the other requests of the batch continue
                _log.exception(
                    "a request cannot be sent to the model", extra={"instance": self._log.label}
                )
                failed.append((call, unexpected_failure(error)))
            else:
                calls.append(call)
        batch.calls = calls
        if calls:
            self._send(batch, requests, frame)
        else:
            if frame:  # arenas that count as announced
                self._connection.send_work(frame)
            if not self._batches.running:
                self._batches.add_batch(batch)
                asyncio.get_running_loop().call_soon(self._batches.finish_unsent, batch)
        for call, failure in failed:
            call.fail(failure)

    def _send(self, batch: Batch, requests: list[WireRequest], frame: list[m.ToStub]) -> None:
        number = self._batches.add_batch(batch)
        block_releases = self._transfer.collect_releases()
        if block_releases is not None:
            frame.append(block_releases)
        if batch.on_returned is None:
            frame.append(m.Execute(number, requests))
            self._connection.send_work(frame)
        else:
            reclaimed = number, tuple(frame)
            frame.append(m.Execute(number, requests, True))
            self._connection.send_work(frame, reclaimed)

    def reclaim_prefetched(self, most: int) -> list[Call]:
        """Takes back at most `most` batches that the stub has not taken; returns their calls."""
        calls: list[Call] = []
        for number, other_messages in self._connection.link.reclaim_frames(most):
            calls += self._batches.withdraw_batch(number)
            if other_messages:
                self._connection.send_work(other_messages)
        return calls

    def stub_exited(self, reason: str) -> None:
        """Called when the stub is gone; later batches fail."""
        self._exit_reason = reason
