"""The standard services of gRPC: server reflection, and the watches of the health service.

Source: docs/reference/grpc.md, "Standard services".
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from functools import cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from tritonclient.grpc import model_config_pb2, service_pb2

from host.errors import ErrorCode, HostError, internal, invalid_argument
from host.frontends.error_status import GRPC_STATUS
from host.frontends.grpc.methods import RpcContext, StreamWriter, UnaryHandler
from host.frontends.receive_memory import ReservedBytes

REFLECTION_SERVICES = (
    "grpc.reflection.v1.ServerReflection",
    "grpc.reflection.v1alpha.ServerReflection",
)
"""Both have the same messages; tools ask for the second one if there is no first one."""

_POLL_SECONDS = 1.0
_NOT_SERVING = b"\x08\x02"  # HealthCheckResponse has one field, the enum `status` = 1
_Field = descriptor_pb2.FieldDescriptorProto
_STRING, _BYTES, _INT32 = _Field.TYPE_STRING, _Field.TYPE_BYTES, _Field.TYPE_INT32


def _add_message(
    file: Any, name: str, *fields: tuple[str, int, Any], repeated: Iterable[str] = ()
) -> Any:
    """Adds a message with fields of a name, a number, and a type or the name of a message."""
    message = file.message_type.add(name=name)
    for field, number, kind in fields:
        label = _Field.LABEL_REPEATED if field in repeated else _Field.LABEL_OPTIONAL
        added = message.field.add(name=field, number=number, label=label)
        if isinstance(kind, str):
            added.type, added.type_name = _Field.TYPE_MESSAGE, f".{file.package}.{kind}"
        else:
            added.type = kind
    return message


def _reflection_file(version: str) -> Any:
    """The published file grpc/reflection/<version>/reflection.proto."""
    file = descriptor_pb2.FileDescriptorProto(
        name=f"grpc/reflection/{version}/reflection.proto",
        package=f"grpc.reflection.{version}",
        syntax="proto3",
    )
    request = _add_message(
        file,
        "ServerReflectionRequest",
        ("host", 1, _STRING),
        ("file_by_filename", 3, _STRING),
        ("file_containing_symbol", 4, _STRING),
        ("file_containing_extension", 5, "ExtensionRequest"),
        ("all_extension_numbers_of_type", 6, _STRING),
        ("list_services", 7, _STRING),
    )
    _add_choice(request, "message_request", "host")
    _add_message(
        file,
        "ExtensionRequest",
        ("containing_type", 1, _STRING),
        ("extension_number", 2, _INT32),
    )
    response = _add_message(
        file,
        "ServerReflectionResponse",
        ("valid_host", 1, _STRING),
        ("original_request", 2, "ServerReflectionRequest"),
        ("file_descriptor_response", 4, "FileDescriptorResponse"),
        ("all_extension_numbers_response", 5, "ExtensionNumberResponse"),
        ("list_services_response", 6, "ListServiceResponse"),
        ("error_response", 7, "ErrorResponse"),
    )
    _add_choice(response, "message_response", "valid_host", "original_request")
    _add_message(
        file,
        "FileDescriptorResponse",
        ("file_descriptor_proto", 1, _BYTES),
        repeated=["file_descriptor_proto"],
    )
    _add_message(
        file,
        "ExtensionNumberResponse",
        ("base_type_name", 1, _STRING),
        ("extension_number", 2, _INT32),
        repeated=["extension_number"],
    )
    _add_message(
        file, "ListServiceResponse", ("service", 1, "ServiceResponse"), repeated=["service"]
    )
    _add_message(file, "ServiceResponse", ("name", 1, _STRING))
    _add_message(file, "ErrorResponse", ("error_code", 1, _INT32), ("error_message", 2, _STRING))
    file.service.add(name="ServerReflection").method.add(
        name="ServerReflectionInfo",
        input_type=f".{file.package}.ServerReflectionRequest",
        output_type=f".{file.package}.ServerReflectionResponse",
        client_streaming=True,
        server_streaming=True,
    )
    return file


def _add_choice(message: Any, name: str, *outside: str) -> None:
    """Makes the fields a oneof, except for those outside."""
    message.oneof_decl.add(name=name)
    for field in message.field:
        if field.name not in outside:
            field.oneof_index = 0


def _health_file() -> Any:
    """The published file grpc/health/v1/health.proto."""
    file = descriptor_pb2.FileDescriptorProto(
        name="grpc/health/v1/health.proto", package="grpc.health.v1", syntax="proto3"
    )
    _add_message(file, "HealthCheckRequest", ("service", 1, _STRING))
    response = _add_message(file, "HealthCheckResponse", ("status", 1, _Field.TYPE_ENUM))
    response.field[0].type_name = f".{file.package}.HealthCheckResponse.ServingStatus"
    status = response.enum_type.add(name="ServingStatus")
    for number, name in enumerate(("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")):
        status.value.add(name=name, number=number)
    service = file.service.add(name="Health")
    for name in ("Check", "Watch"):
        service.method.add(
            name=name,
            input_type=f".{file.package}.HealthCheckRequest",
            output_type=f".{file.package}.HealthCheckResponse",
            server_streaming=name == "Watch",
        )
    return file


@cache
def _pool() -> Any:
    """Describes all services, apart from what the process has in its own pool."""
    pool = descriptor_pool.DescriptorPool()
    for module in (model_config_pb2, service_pb2):
        pool.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
    for file in (_health_file(), _reflection_file("v1"), _reflection_file("v1alpha")):
        pool.AddSerializedFile(file.SerializeToString())
    return pool


@cache
def _message_class(name: str) -> Any:
    found = _pool().FindMessageTypeByName(f"grpc.reflection.v1.{name}")
    return message_factory.GetMessageClass(found)


class StandardStream:
    """A stream that answers each message, and ends with its client or with the server.

    `open_streams` has it until then.
    """

    def __init__(self, writer: StreamWriter, open_streams: set[StandardStream]) -> None:
        self._writer = writer
        self._open_streams = open_streams
        self._ended = False
        open_streams.add(self)

    def end(self, error: HostError | None = None) -> None:
        """Ends the stream."""
        if not self._ended:
            self.cancel()
            self._writer.finish_stream(error)

    def cancel(self) -> None:
        """Called when the stream has ended."""
        if not self._ended:
            self._ended = True
            self._open_streams.discard(self)


class ReflectionStream(StandardStream):
    """Answers what the services are, and which messages they have.

    `services`: the names that it lists. `authorize`: raises HostError if the client may not ask
    that; None if any client may.
    """

    def __init__(
        self,
        writer: StreamWriter,
        open_streams: set[StandardStream],
        services: Iterable[str],
        authorize: Callable[[], Awaitable[object]] | None,
    ) -> None:
        super().__init__(writer, open_streams)
        self._services = sorted(services)
        self._authorize = authorize
        self._checking: asyncio.Task[None] | None = None
        self._busy = self._half_closed = False

    def message_received(self, message: bytes, reserved: ReservedBytes | None = None) -> bool:
        """Answers a request; whether the next one may arrive."""
        if self._authorize is not None:
            self._busy = True
            self._checking = asyncio.ensure_future(self._check(self._authorize, message))
            return False
        return self._respond(message)

    async def _check(self, authorize: Callable[[], Awaitable[object]], message: bytes) -> None:
        try:
            await authorize()
        except HostError as error:
            self._checking = None
            self.end(error)
            return
        self._checking = self._authorize = None
        if self._respond(message):
            self._continue()

    def _respond(self, message: bytes) -> bool:
        """Writes a response; whether the next request may be answered at once."""
        request_class = _message_class("ServerReflectionRequest")
        try:
            request = request_class.FromString(message)
        except DecodeError as error:
            text = f"failed to parse the ServerReflectionRequest message: {error}"
            self.end(invalid_argument(text))
            return False
        response = self._answer(request).SerializeToString()
        self._busy = not self._writer.write_message(response, False)
        return not self._busy

    def _answer(self, request: Any) -> Any:
        response = _message_class("ServerReflectionResponse")(
            valid_host=request.host, original_request=request
        )
        asked = request.WhichOneof("message_request")
        try:
            if asked == "list_services":
                for name in self._services:
                    response.list_services_response.service.add(name=name)
            elif asked == "file_by_filename":
                _add_files(response, _pool().FindFileByName(request.file_by_filename))
            elif asked == "file_containing_symbol":
                _add_files(response, _find_file(request.file_containing_symbol))
            elif asked == "all_extension_numbers_of_type":  # no message has extensions
                name = request.all_extension_numbers_of_type
                _pool().FindMessageTypeByName(name)
                response.all_extension_numbers_response.base_type_name = name
            else:
                raise KeyError(asked or "an empty request")
        except KeyError as error:
            response.error_response.error_code = GRPC_STATUS[ErrorCode.NOT_FOUND]
            response.error_response.error_message = f"not found: {error.args[0]}"
        return response

    def half_closed(self) -> None:
        """The client has no more requests."""
        self._half_closed = True
        if not self._busy:
            self.end()

    def resume_writing(self) -> None:
        """There is room again."""
        if self._busy and self._checking is None:
            self._busy = False
            self._continue()

    def _continue(self) -> None:
        if self._half_closed:
            self.end()
        else:
            self._writer.resume_reading()

    def cancel(self) -> None:
        """Called when the stream has ended."""
        if self._checking is not None:
            self._checking.cancel()
        super().cancel()


def _find_file(symbol: str) -> Any:
    """The file with a symbol; the pool does not find methods. Raises KeyError."""
    try:
        return _pool().FindFileContainingSymbol(symbol)
    except KeyError:
        service, _, method = symbol.rpartition(".")
        found = _pool().FindServiceByName(service)
        if method not in found.methods_by_name:
            raise
        return found.file


def _add_files(response: Any, file: Any) -> None:
    """Adds a file and those that it imports."""
    todo, found = [file], {}
    while todo:
        one = todo.pop()
        if one.name not in found:
            found[one.name] = one.serialized_pb
            todo += one.dependencies
    response.file_descriptor_response.file_descriptor_proto.extend(found.values())


class HealthWatch(StandardStream):
    """Sends whether the server is ready, and again with each change.

    `check` answers `Health.Check`.
    """

    def __init__(
        self,
        writer: StreamWriter,
        open_streams: set[StandardStream],
        check: UnaryHandler,
        context: RpcContext,
    ) -> None:
        super().__init__(writer, open_streams)
        self._check = check
        self._context = context
        self._room = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def message_received(self, message: bytes, reserved: ReservedBytes | None = None) -> bool:
        """Begins with the first request, which is the only one."""
        if self._task is None:
            self._task = asyncio.ensure_future(self._watch(message))
        return True

    async def _watch(self, message: bytes) -> None:
        last = b""
        while True:
            try:
                status = await self._check(message, self._context)
            except HostError:  # the server exits
                status = _NOT_SERVING
            except Exception as error:
                self._task = None
                self.end(internal(f"the health cannot be read: {error}"))
                raise
            if status != last:
                last = status
                self._room.clear()
                if not self._writer.write_message(status, False):
                    await self._room.wait()
            await asyncio.sleep(_POLL_SECONDS)

    def half_closed(self) -> None:
        """The client has sent its request."""

    def resume_writing(self) -> None:
        """There is room again."""
        self._room.set()

    def cancel(self) -> None:
        """Called when the stream has ended."""
        if self._task is not None:
            self._task.cancel()
        super().cancel()
