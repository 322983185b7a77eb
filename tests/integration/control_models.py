"""Models that control models, or are slow or picky about being loaded, as source text."""

from __future__ import annotations

import json
import textwrap

from tests.clients import Client
from tests.waiting import UNTIL_SOURCE

CONFIG = """
    backend: "python"
    input { name: "COMMAND" data_type: TYPE_STRING dims: 1 }
    output { name: "ANSWER" data_type: TYPE_STRING dims: 1 }
"""

JSON = json.dumps(
    {
        "backend": "python",
        "input": [{"name": "COMMAND", "data_type": "TYPE_STRING", "dims": [1]}],
        "output": [{"name": "ANSWER", "data_type": "TYPE_STRING", "dims": [1]}],
    }
)

HEAD = f"""
import json
import os

import numpy as np
import triton_python_backend_utils as pb_utils

{UNTIL_SOURCE}
def attempt(call):
    function, *arguments = json.loads(call)
    options = arguments.pop() if arguments[-1:] == [{{"hold": True}}] else {{}}
    if len(arguments) > 2:
        arguments[2] = {{path: text.encode() for path, text in arguments[2].items()}}
    try:
        return repr(getattr(pb_utils, function)(*arguments, **options))
    except pb_utils.TritonModelException as error:
        return str(error)
"""
"""`attempt` calls `pb_utils`: JSON of the function's name and its arguments, files as text.

The last argument may be `{"hold": true}`.
"""

MODEL = (
    HEAD
    + """
class TritonPythonModel:
    def initialize(self, args):
        self.args = args

    def execute(self, requests):
        responses = []
        for request in requests:
            text = pb_utils.get_input_tensor_by_name(request, "COMMAND").as_numpy()[0].decode()
            name, _, argument = text.partition(" ")
            answer = getattr(self, name)(argument)
            array = np.array([answer.encode()], dtype=np.object_)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("ANSWER", array)]))
        return responses

    def name(self, _):
        return "NAME"

    def pid(self, _):
        return str(os.getpid())

    def where(self, _):
        return self.args["model_repository"]

    def call(self, text):
        return attempt(text)

    def wait(self, path):
        print("waiting", flush=True)
        until(lambda: os.path.exists(path), path)
        return "waited"
"""
)
"""Answers commands; `NAME` is to be replaced."""


def model(name: str = "x") -> str:
    return MODEL.replace("NAME", name)


def starting(body: str) -> str:
    """A model with this in `initialize`."""
    return f"{HEAD}\n\nclass TritonPythonModel:\n    def initialize(self, args):\n" + (
        textwrap.indent(textwrap.dedent(body), " " * 8)
        + "\n    def execute(self, requests):\n        return [None for _ in requests]\n"
    )


def index(client: Client, name: str) -> list[tuple[str, str, str]]:
    """(version, state, reason) of a model in the repository index."""
    models = client.get_model_repository_index().models
    return [(m.version, m.state, m.reason) for m in models if m.name == name]
