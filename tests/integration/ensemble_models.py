"""Ensembles for tests, and members whose code stands in their configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tritonclient.grpc as grpcclient

from tests.clients import Client, tensor
from tests.conftest import RepositoryBuilder

CHAIN = """
platform: "ensemble"
input [ { name: "INPUT0", data_type: TYPE_FP32, dims: [ -1 ] } ]
output [ { name: "OUTPUT0", data_type: TYPE_FP32, dims: [ -1 ] } ]
ensemble_scheduling { step [
  { model_name: "identity", model_version: -1,
    input_map { key: "INPUT0", value: "INPUT0" },
    output_map { key: "OUTPUT0", value: "OUTPUT0" } }
] }
"""
"""The model `identity` of `tests/models`, as the only step."""

MEMBER = '''
import json
import os
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils


def wait_for(path):
    """Another process has got that far."""
    end = time.monotonic() + 120
    while not os.path.exists(path):
        assert time.monotonic() < end, path
        threading.Event().wait(0.005)


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        code = config["parameters"]["code"]["string_value"]
        names = dict(globals(), __name__=config["name"])
        exec("def run(self, request, x, y):\\n" + textwrap.indent(code, " "), names)
        self.run = names["run"]
        self.decoupled = config["model_transaction_policy"]["decoupled"]

    def execute(self, requests):
        if self.decoupled:
            for request in requests:
                self.stream(request)
            return None
        return [self.response(request, self.returned(request)) for request in requests]

    def stream(self, request):
        sender = request.get_response_sender()
        for outputs in self.returned(request):
            sender.send(self.response(request, outputs))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def returned(self, request):
        given = [pb_utils.get_input_tensor_by_name(request, name) for name in ("X", "Y")]
        return self.run(self, request, *[t if t is None else t.as_numpy() for t in given])

    def response(self, request, outputs):
        if isinstance(outputs, pb_utils.InferenceResponse):
            return outputs
        asked = request.requested_output_names()
        tensors = [pb_utils.Tensor(n, np.asarray(v)) for n, v in outputs.items() if n in asked]
        return pb_utils.InferenceResponse(tensors)
'''

COUNT = """
numbers = range(int(x[0])) if x[0] >= 0 else [5, -1] + [6] * int(-x[0])
return [{"A": np.array([number], np.float32)} for number in numbers]
"""
"""0, 1, 2, ..., of a decoupled member."""

LATE = """
folder = Path(__file__).parents[2]
if x[0]:
    (folder / f"late-{int(x[0])}").touch()
else:
    wait_for(folder / "late-5")
return {"A": x}
"""
"""0 takes longer than the five numbers that follow."""

GATHER = """
model = json.loads(request.parameters())["model"]
name, output = ("X", "A") if model == "count" else ("I", "O")
found = []
for part in pb_utils.InferenceRequest(
    model_name=model, inputs=[pb_utils.Tensor(name, x)], requested_output_names=[output]
).exec(decoupled=True):
    if part.has_error():
        return pb_utils.InferenceResponse(error=part.error())
    found += [number for one in part.output_tensors() for number in one.as_numpy()]
return {"A": np.array(found, np.float32)}
"""
"""All numbers that `count`, or an ensemble with it, sends to another model."""


def tensors(names: str, kind: str = "TYPE_FP32", dims: str = "-1") -> str:
    """A list of inputs or outputs; a name that ends in `?` is optional, `name:TYPE` has a type."""
    entries = []
    for word in names.split():
        name, _, own = word.rstrip("?").partition(":")
        optional = ", optional: true" if word.endswith("?") else ""
        entries.append(
            f'{{ name: "{name}", data_type: {own or kind}, dims: [ {dims} ]{optional} }}'
        )
    return f"[ {', '.join(entries)} ]"


def add_member(
    repository: RepositoryBuilder,
    name: str,
    code: str,
    *,
    inputs: str = "X? Y?",
    outputs: str = "A B",
    kind: str = "TYPE_FP32",
    dims: str = "-1",
    batch: int = 0,
    decoupled: bool = False,
    count: int = 1,
    extra: str = "",
) -> None:
    """A model; `code` is the body of a function of `request`, `x` and `y`: outputs by name.

    A decoupled one returns an iterable of them.
    """
    repository.add(
        name,
        MEMBER,
        f"""
        backend: "python"
        max_batch_size: {batch}
        input {tensors(inputs, kind, dims)}
        output {tensors(outputs, kind, dims)}
        instance_group [ {{ count: {count} }} ]
        model_transaction_policy {{ decoupled: {str(decoupled).lower()} }}
        parameters {{ key: "code" value {{ string_value: {json.dumps(code)} }} }}
        {extra}
        """,
    )


Step = tuple[str, Mapping[str, str], Mapping[str, str]]
"""A member, what its inputs are, and what its outputs become."""


def config_of(
    inputs: str,
    outputs: str,
    steps: Sequence[Step],
    *,
    batch: int = 0,
    kind: str = "TYPE_FP32",
    dims: str = "-1",
    version: int = -1,
    scheduling: str = "",
    extra: str = "",
) -> str:
    """The configuration of an ensemble."""

    def pairs(field: str, mapping: Mapping[str, str]) -> str:
        return " ".join(f'{field} {{ key: "{k}" value: "{v}" }}' for k, v in mapping.items())

    parts = [
        f'{{ model_name: "{model}" model_version: {version} {pairs("input_map", given)}'
        f" {pairs('output_map', made)} }}"
        for model, given, made in steps
    ]
    return f"""
        platform: "ensemble"
        max_batch_size: {batch}
        input {tensors(inputs, kind, dims)}
        output {tensors(outputs, kind, dims)}
        ensemble_scheduling {{ {scheduling} step [ {", ".join(parts)} ] }}
        {extra}
        """


def add_ensemble(
    repository: RepositoryBuilder,
    name: str,
    inputs: str,
    outputs: str,
    steps: Sequence[Step],
    **options: Any,
) -> Path:
    """An ensemble of other models."""
    return repository.add(name, config=config_of(inputs, outputs, steps, **options))


def send_request(
    client: Client,
    model: str,
    *,
    outputs: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
    **inputs: Any,
) -> dict[str, Any]:
    """The outputs of a model as lists; inputs that are no arrays are made FP32 ones."""
    result = infer(client, model, outputs=outputs, options=options, **inputs)
    return {
        output.name: result.as_numpy(output.name).tolist()
        for output in result.get_response().outputs
    }


def infer(
    client: Client,
    model: str,
    *,
    outputs: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
    **inputs: Any,
) -> Any:
    """The client's own result."""
    return client.infer(
        model,
        [tensor(name, array_of(value)) for name, value in inputs.items()],
        outputs=[grpcclient.InferRequestedOutput(name) for name in outputs] or None,
        **(options or {}),
    )


def array_of(value: Any) -> npt.NDArray[Any]:
    """An array as it is, anything else as FP32."""
    return value if isinstance(value, np.ndarray) else np.array(value, np.float32)
