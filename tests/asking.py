"""Short ways to ask the test models with the real client."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

Client = grpcclient.InferenceServerClient


def tensor(name: str, array: npt.NDArray[Any], datatype: str = "") -> grpcclient.InferInput:
    """An input with this array's bytes."""
    datatype = datatype or np_to_triton_dtype(array.dtype)
    return grpcclient.InferInput(name, array.shape, datatype).set_data_from_numpy(array)


def command(client: Client, text: str, model: str = "misbehave", **options: Any) -> str:
    """Have `misbehave` do something; its answer."""
    array = np.array([text.encode()], dtype=np.object_)
    result = client.infer(model, [tensor("COMMAND", array)], **options)
    answer: bytes = result.as_numpy("ANSWER")[0]
    return answer.decode()


def ask(client: Client, target: str, array: npt.NDArray[Any], model: str = "ask") -> Any:
    """Have `ask` ask another model."""
    named = np.array([target.encode()], dtype=np.object_)
    result = client.infer(model, [tensor("MODEL", named), tensor("INPUT0", array)])
    return result.as_numpy("OUTPUT0")


def failure(call: Any, *arguments: Any, **options: Any) -> tuple[str, str]:
    """The status and the text with which a client's call fails."""
    with pytest.raises(InferenceServerException) as caught:
        call(*arguments, **options)
    return str(caught.value.status()), str(caught.value.message())
