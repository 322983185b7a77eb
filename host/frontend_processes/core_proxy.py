"""The core as a frontend process sees it: requests are messages, tensors are references."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from host.cache.responses import CacheHit
from host.config.schema import ModelConfig
from host.errors import HostError, invalid_argument, unsupported
from host.frontend_processes.core_link import CoreLink
from host.frontend_processes.exchanged_memory import FrontendMemory, RegionPlace
from host.frontend_processes.frontend_messages import (
    AwaitModel,
    CancelInfer,
    Infer,
    RepeatedInfer,
    Response,
    ResponseAck,
    WireResponse,
    WireTensor,
    decode_error,
)
from host.frontend_processes.remote_state import (
    KEY_ERRORS,
    ModelTable,
    RemoteKeys,
    RemoteTrace,
    RemoteTracer,
    current_sender,
)
from host.frontend_processes.request_templates import SentTemplates
from host.inference.call import Call, CallHolder
from host.inference.request import InferRequest, InferResponse
from host.instances.arenas import arena_full_error
from host.models.registry import NotServedError, parse_version
from stub.wire.arena import ArenaFull
from stub.wire.messages import BlockRelease

_Started = TypeVar("_Started")

_INLINE_BYTES = 1 << 13  # of tensors in a message; the core would copy them twice


class CoreProxy:
    """Implements `InferenceCore` in a frontend process. Belongs to the event loop."""

    def __init__(
        self, link: CoreLink, memory: FrontendMemory, loads_on_demand: bool, needs_keys: bool
    ) -> None:
        self._link = link
        self.keys = RemoteKeys(link) if needs_keys else None
        """The API keys that clients need, or None."""
        self._memory = memory
        self._models = ModelTable(link)
        self._tracer = RemoteTracer(link)
        self._templates = SentTemplates()
        self._calls: dict[int, RemoteCall] = {}
        self._unconfirmed: dict[int, asyncio.Future[None]] = {}
        self._sent_anyway: InferRequest | None = None  # its model may have been unloaded again
        self.loads_on_demand = loads_on_demand
        self.regions = _Regions()

    @property
    def request_tracer(self) -> RemoteTracer | None:
        """Starts traces; None while no request is traced."""
        return self._tracer if self._link.state.tracing else None

    def infer(self, request: InferRequest, unary: bool = False) -> Call:
        """As `InferenceCore.infer`. What is wrong with the tensors is the response of the call."""
        return self._start(request, unary, confirm=False)

    def _start(self, request: InferRequest, unary: bool, confirm: bool) -> RemoteCall:
        if request is not self._sent_anyway:
            config = self._models.find(request.model_name, request.model_version)
            if unary and config.model_transaction_policy.decoupled:
                raise unsupported(
                    "ModelInfer RPC doesn't support models with decoupled transaction policy"
                )
        number = next(self._link.numbers)
        if request.trace is not None or confirm:  # a template has no place for these
            self._send_request(number, request, unary, confirm, 0)
        elif template := self._templates.find(request, unary):
            self._repeat_request(number, request, template)
        else:
            new_template = self._templates.assign_number(request, unary)
            self._send_request(number, request, unary, confirm, new_template)
        request.inputs = []  # releases the received message; the tensors are in shared memory
        request.classification = None  # the core classifies
        call = RemoteCall(request, number=number)
        call.holder = _RemoteHolder(self, number)
        self._calls[number] = call
        if not unary:
            call.on_response_acknowledged = partial(self._acknowledge, number)
        return call

    def _send_request(
        self, number: int, request: InferRequest, unary: bool, confirm: bool, template: int
    ) -> None:
        """`template`: the number by which the core shall know the request, or 0."""
        inputs: list[WireTensor] = []
        sender = current_sender.get()
        limit = self._content_limit(request)
        try:
            # What is encoded before an error stays in the list.
            inputs.extend(self._memory.encode_tensor(tensor, limit) for tensor in request.inputs)
            message = Infer(
                number,
                request.model_name,
                inputs,
                request.model_version,
                request.id,
                request.requested_outputs,
                unary,
                request.parameters,
                request.correlation_id,
                request.flags,
                request.priority,
                request.timeout_us,
                None if request.classification is None else request.classification.counts,
                _encode_placement(request),
                request.trace.take_events() if isinstance(request.trace, RemoteTrace) else None,
                request.reserved_memory is not None,
                confirm,
                b"" if sender is None else sender.header,
                0 if sender is None else sender.admission,
                template,
            )
            self._link.send(message)
        except ArenaFull as full:
            self._memory.cancel_export(inputs)
            raise arena_full_error(full) from None
        except (TypeError, ValueError, OverflowError) as error:
            self._memory.cancel_export(inputs)
            raise invalid_argument(f"the request cannot be sent to its model: {error}") from None
        except Exception:  # a defect of ours, which the endpoint handles
            self._memory.cancel_export(inputs)
            raise
        if template:
            self._templates.add(request, unary, template)

    def _content_limit(self, request: InferRequest) -> int:
        """The bytes of each tensor of a request that a message may contain."""
        return min(_INLINE_BYTES, self._link.inline_limit()) // max(1, len(request.inputs))

    def _repeat_request(self, number: int, request: InferRequest, template: int) -> None:
        contents: list[bytes | int] = []
        sender = current_sender.get()
        limit = self._content_limit(request)
        encode = self._memory.encode_content
        try:
            # What is encoded before an error stays in the list.
            contents.extend(encode(tensor, limit) for tensor in request.inputs)
            message = RepeatedInfer(
                number,
                template,
                contents,
                request.id,
                request.reserved_memory is not None,
                b"" if sender is None else sender.header,
                0 if sender is None else sender.admission,
            )
            self._link.send(message)
        except ArenaFull as full:
            self._memory.cancel_content_export(contents)
            raise arena_full_error(full) from None
        except (TypeError, ValueError, OverflowError) as error:  # an id that is not UTF-8
            self._memory.cancel_content_export(contents)
            raise invalid_argument(f"the request cannot be sent to its model: {error}") from None
        except Exception:  # a defect of ours, which the endpoint handles
            self._memory.cancel_content_export(contents)
            raise

    def _acknowledge(self, number: int, response: InferResponse) -> None:
        self._link.send(ResponseAck(number))

    def withdraw(self, number: int) -> None:
        """Cancels a request, as its client waits no longer."""
        if self._calls.pop(number, None) is not None:
            self._link.send(CancelInfer(number))

    def handle_response(self, message: Response) -> None:
        """Passes a response on. Raises KeyError or ValueError for an invalid reference."""
        call = self._calls.get(message.number)
        response = None
        if message.response is not None:
            response = self._decode_response(message.response)
        if call is None:
            return  # it was cancelled meanwhile
        if message.final:
            del self._calls[message.number]
        if message.refused:
            call.refused = True
            error = None if response is None else response.error
            if self.keys is not None and error is not None and error.code in KEY_ERRORS:
                self.keys.forget()
            accepted = self._unconfirmed.get(message.number)
            if accepted is not None and response is not None and response.error is not None:
                if not accepted.done():  # its client may have gone
                    accepted.set_exception(response.error)
                return
            if call.request.trace is not None:
                call.request.trace.finish_response()  # its endpoint records nothing more
        call.respond(response, message.final)

    def request_accepted(self, number: int) -> None:
        """Lets `infer_when_loaded` return."""
        accepted = self._unconfirmed.get(number)
        if accepted is not None and not accepted.done():
            accepted.set_result(None)

    def request_taken(self, number: int) -> None:
        """Stops to count the memory of a request, which may have ended."""
        call = self._calls.get(number)
        if call is not None:
            call.request.reserved_memory = None

    def _decode_response(self, wire: WireResponse) -> InferResponse:
        error = None if wire.error is None else decode_error(wire.error)
        outputs = [self._memory.decode_tensor(output) for output in wire.outputs]
        return InferResponse(wire.model, wire.version, wire.id, outputs, wire.parameters, error)

    def release_blocks(self, message: BlockRelease) -> None:
        """Releases blocks that the core has returned."""
        self._memory.release_blocks(message)

    async def start_when_loaded(
        self, request: InferRequest, start: Callable[[], _Started]
    ) -> _Started:
        """As `InferenceCore.start_when_loaded`."""
        try:
            return start()
        except NotServedError:
            if not self.loads_on_demand:
                raise
        sender = current_sender.get()
        if sender is not None:
            sender.withdraw_admission()  # of an earlier wait: the request counts once
        number = next(self._link.numbers)
        question = AwaitModel(
            number,
            request.model_name,
            request.model_version,
            request.priority,
            request.timeout_us,
            b"" if sender is None else sender.header,
        )
        await self._link.ask(question, number)
        if sender is not None:
            sender.admission = number
        self._sent_anyway = request
        try:
            return start()
        finally:
            self._sent_anyway = None

    def repeat_cache_hit(self, name: str, version: int, hit: CacheHit) -> bool:
        """Returns False: the cache is in another process."""
        return False

    async def infer_when_loaded(self, request: InferRequest) -> Call:
        """As `InferenceCore.infer_when_loaded`; raises what is wrong with the tensors as well."""
        call = await self.start_when_loaded(request, lambda: self._start(request, False, True))
        accepted = self._unconfirmed[call.number] = asyncio.get_running_loop().create_future()
        try:
            await accepted
        except asyncio.CancelledError:
            call.cancel()
            raise
        finally:
            del self._unconfirmed[call.number]
        return call

    def model_config(self, name: str, version: str) -> ModelConfig:
        """As `InferenceCore.model_config`."""
        return self._models.find(name, parse_version(version))

    async def config_when_loaded(self, name: str, version: str) -> ModelConfig:
        """As `InferenceCore.config_when_loaded`."""
        request = InferRequest(name, [], parse_version(version))
        return await self.start_when_loaded(request, lambda: self.model_config(name, version))

    def tensor_counts(self, name: str, version: str) -> tuple[int, int]:
        """As `InferenceCore.tensor_counts`."""
        try:
            config = self.model_config(name, version)
        except HostError:
            return 0, 0
        return len(config.input), len(config.output)


class RemoteCall(Call):
    """A call that the core has."""

    number: int = 0
    refused: bool = False


class _RemoteHolder(CallHolder):
    """The holder of a call that the core has."""

    __slots__ = ("_core", "_number")

    def __init__(self, core: CoreProxy, number: int) -> None:
        self._core = core
        self._number = number

    def cancel_call(self, call: Call) -> bool:
        """As `CallHolder.cancel_call`. Frontends only withdraw calls."""
        self._core.withdraw(self._number)
        return False


class _Regions:
    """Places in shared memory of clients; the core finds and checks them."""

    def find_block(self, name: str, offset: int, byte_size: int) -> RegionPlace:
        """A place in a region, whether it exists or not."""
        return RegionPlace(name, offset, byte_size)


def _encode_placement(request: InferRequest) -> dict[str, tuple[str, int, int]] | None:
    if not request.output_placement:
        return None
    placement: dict[str, tuple[str, int, int]] = {}
    for output, place in request.output_placement.items():
        assert isinstance(place, RegionPlace)
        placement[output] = place.name, place.offset, place.size
    return placement
