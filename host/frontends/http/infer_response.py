"""Encodes an `InferResponse` as the parts of an HTTP body (docs/reference/protocol.md, "Inference
response").
"""

from __future__ import annotations

import functools
from collections.abc import Container

from host.errors import internal
from host.frontends.http import json_text as json
from host.frontends.http.steps import Steps
from host.frontends.http.tensors import write_tensor
from host.inference.request import Buffer, InferResponse, read_bytes

_CACHE_SIZE = 2048  # entries of each cache


class AllNames:
    """A container of every name."""

    def __contains__(self, name: object) -> bool:
        return True


ALL_NAMES = AllNames()


def encode_infer_response(
    response: InferResponse, binary: Container[str], outputs_in_shared_memory: Container[str]
) -> Steps[tuple[bytes, list[Buffer]]]:
    """Returns the JSON part, and the data of the outputs named in `binary`, in order.

    Outputs in `outputs_in_shared_memory` have their data there already. Raises
    HostError with the texts of docs/reference/protocol.md, "Inference response".
    """
    chunks: list[Buffer] = []
    try:
        parts = [b"{", _model_fields(response.model_name, response.model_version)]
        if response.id:
            parts[0] = b'{"id":%b,' % json.dump(response.id)
        if response.parameters:
            parts += (b',"parameters":', json.dump(response.parameters))
        separator = b',"outputs":['
        for tensor in response.outputs:
            name, datatype, shape = tensor.name, tensor.datatype, tuple(tensor.shape)
            parts.append(separator)
            separator = b","
            if name in outputs_in_shared_memory:
                parts += (_output_head(name, datatype, shape), b"}")
            elif name in binary:
                data = read_bytes(tensor.data)
                size = len(data) if type(data) is bytes else memoryview(data).nbytes
                parts.append(_binary_output(name, datatype, shape, size))
                if size:
                    chunks.append(data)
            else:
                values = yield from write_tensor(tensor)
                parts += (_output_head(name, datatype, shape), b',"data":', values, b"}")
    except (TypeError, ValueError, BufferError) as error:  # a name, a shape, a value
        raise internal(
            f"response of model '{response.model_name}' cannot be sent: {error}"
        ) from None
    parts.append(b"]}" if response.outputs else b',"outputs":[]}')
    return b"".join(parts), chunks


@functools.lru_cache(_CACHE_SIZE)
def _model_fields(name: str, version: int) -> bytes:
    return b'"model_name":%b,"model_version":"%d"' % (json.dump(name), version)


@functools.lru_cache(_CACHE_SIZE)
def _output_head(name: str, datatype: str, shape: tuple[int, ...]) -> bytes:
    """Returns the JSON of an output without its closing brace."""
    whole = json.dump({"name": name, "datatype": datatype, "shape": list(shape)})
    return whole[:-1]


@functools.lru_cache(_CACHE_SIZE)
def _binary_output(name: str, datatype: str, shape: tuple[int, ...], size: int) -> bytes:
    return _output_head(name, datatype, shape) + b',"parameters":{"binary_data_size":%d}}' % size
