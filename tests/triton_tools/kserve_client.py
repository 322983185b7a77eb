"""Asks a server with KServe's SDK: `kserve_client.py HTTP GRPC`; prints the answers as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig
from kserve.protocol.infer_type import RequestedOutput

NUMBERS = np.array([1, 2, 3, 4], dtype=np.float32)
TEXTS = np.array(["a", "é"], dtype=object)


def request(model: str, datatype: str, array: npt.NDArray[Any], *, binary: bool) -> Any:
    """A request with one input; over REST, `binary` is the form of input and output."""
    tensor = InferInput("INPUT0", list(array.shape), datatype)
    tensor.set_data_from_numpy(array, binary_data=binary)
    output = RequestedOutput("OUTPUT0", {"binary_data": True})
    outputs = [output] if binary else []
    return InferRequest(
        model_name=model, infer_inputs=[tensor], request_outputs=outputs, request_id="7"
    )


def values(response: Any) -> list[Any]:
    """The id and the first output, whose strings are bytes or texts."""
    items = response.outputs[0].as_numpy().tolist()
    return [response.id, [i.decode() if isinstance(i, bytes) else i for i in items]]


async def main(http: str, grpc: str) -> None:
    """Prints the answers."""
    found: dict[str, Any] = {}
    async with InferenceGRPCClient(grpc) as client:
        found["health"] = [await client.is_server_live(), await client.is_server_ready()]
        found["models"] = [await client.is_model_ready(m) for m in ("identity_fp32", "missing")]
        for binary in (False, True):
            numbers = await client.infer(request("identity_fp32", "FP32", NUMBERS, binary=binary))
            texts = await client.infer(request("identity_bytes", "BYTES", TEXTS, binary=binary))
            found[f"gRPC, {'raw' if binary else 'typed'}"] = [values(numbers), values(texts)]
    client = InferenceRESTClient(RESTConfig(protocol="v2", timeout=60))
    found["REST: models"] = [
        await client.is_model_ready(http, name) for name in ("identity_fp32", "missing")
    ]
    for binary in (False, True):
        answers = [
            values(await client.infer(http, request(model, datatype, array, binary=binary), model))
            for model, datatype, array in (
                ("identity_fp32", "FP32", NUMBERS),
                ("identity_bytes", "BYTES", TEXTS),
            )
        ]
        found[f"REST, {'bytes' if binary else 'JSON'}"] = answers
    await client.close()
    print(json.dumps(found))


asyncio.run(main(f"http://{sys.argv[1]}", sys.argv[2]))
