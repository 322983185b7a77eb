"""Methods that replicas call of each other by connections."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

_Result = TypeVar("_Result")


class ReplicaMethod(Generic[_Result]):
    """The name of a method, and what it takes and returns.

    `arguments`: a tuple type; `result`: a type. Both are sent as MessagePack, which has plain
    values, containers and dataclasses.
    """

    def __init__(self, name: str, arguments: Any, result: Any) -> None:
        self.name = name
        self._decode_arguments = msgspec.msgpack.Decoder(arguments).decode
        self._decode_result = msgspec.msgpack.Decoder(result).decode

    def decode_arguments(self, encoded: bytes | msgspec.Raw) -> tuple[Any, ...]:
        """The arguments of a call. Raises `host.ray.channels.frames.DECODE_ERRORS`."""
        arguments: tuple[Any, ...] = self._decode_arguments(encoded)
        return arguments

    def decode_result(self, encoded: bytes) -> _Result:
        """The result of a call. Raises `host.ray.channels.frames.DECODE_ERRORS`."""
        result: _Result = self._decode_result(encoded)
        return result
