"""Models of the OpenAI routes for tests, and a client that shows the bytes of an answer."""

from __future__ import annotations

import http.client
import json
from contextlib import closing
from typing import Any, NamedTuple

from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost

LETTERS = '''
"""Answers with the pieces of its prompt, which are cut at "|". Some pieces are commands."""
import os
import threading
import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.answer, args=(request,)).start()

    def answer(self, request):
        sender = request.get_response_sender()
        tensor = pb_utils.get_input_tensor_by_name(request, "prompt")
        limit = pb_utils.get_input_tensor_by_name(request, "max_tokens")
        limit = 1000 if limit is None else int(limit.as_numpy().reshape(-1)[0])
        prompt = tensor.as_numpy().reshape(-1)[0]
        count = 0
        for piece in prompt.split(b"|")[:limit]:
            if piece == b"FAIL":
                error = pb_utils.TritonError("the model is tired")
                sender.send(pb_utils.InferenceResponse(error=error), flags=FINAL)
                return
            if piece == b"PARAMETERS":
                piece = request.parameters().encode()
            if piece == b"DIE":
                os._exit(1)
            if piece == b"WAIT":
                print("waiting", flush=True)
                while not sender.is_cancelled():
                    threading.Event().wait(0.005)
                print("cancelled", prompt, flush=True)
                break
            count += 1
            array = np.array([bytes(piece)], dtype=np.object_)
            sender.send(pb_utils.InferenceResponse(
                [pb_utils.Tensor("token", array)], parameters={"completion_tokens": 1,
                "prompt_tokens": len(prompt.split(b"|"))}))
        sender.send(flags=FINAL)
'''
LETTERS_CONFIG = """
backend: "python"
input [
  { name: "prompt" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "max_tokens" data_type: TYPE_INT32 dims: [ 1 ] optional: true }
]
output [ { name: "token" data_type: TYPE_STRING dims: [ 1 ] } ]
model_transaction_policy { decoupled: true }
parameters { key: "OPENAI" value { string_value: "chat, completions" } }
parameters { key: "OPENAI_CHAT_TEMPLATE" value { string_value: "last" } }
parameters { key: "OPENAI_NAMES" value { string_value: "acme/letters" } }
"""
WHOLE = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        texts = [pb_utils.get_input_tensor_by_name(r, "text_input").as_numpy() for r in requests]
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("text_output",
                np.array([text.reshape(-1)[0].upper()], dtype=np.object_).reshape(text.shape))])
            for text in texts
        ]
"""
WHOLE_CONFIG = """
backend: "python"
max_batch_size: 8
input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] } ]
"""
AGENT = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            text = pb_utils.get_input_tensor_by_name(request, "openai_request").as_numpy()[0]
            for line in json.loads(text)["messages"][-1]["content"].splitlines():
                array = np.array([line.encode()], dtype=np.object_)
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("openai_response", array)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
AGENT_CONFIG = """
backend: "python"
input [ { name: "openai_request" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "openai_response" data_type: TYPE_STRING dims: [ 1 ] } ]
model_transaction_policy { decoupled: true }
"""


def add_models(repository: RepositoryBuilder) -> None:
    """Writes all models of this module."""
    repository.add("letters", LETTERS, LETTERS_CONFIG)
    repository.add("whole", WHOLE, WHOLE_CONFIG)
    repository.add("agent", AGENT, AGENT_CONFIG)
    repository.copy("identity")


class Reply(NamedTuple):
    """An answer of the server."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object of the body."""
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return dict(error)

    @property
    def events(self) -> list[Any]:
        """The events of a stream; the last one of a complete stream is the text "[DONE]"."""
        assert self.headers["content-type"] == "text/event-stream; charset=utf-8"
        *parts, rest = self.body.split(b"\n\n")
        assert rest == b"" and all(part.startswith(b"data: ") for part in parts)
        texts = [part[len(b"data: ") :] for part in parts]
        return [text.decode() if text == b"[DONE]" else json.loads(text) for text in texts]


def send(
    host: RunningHost,
    method: str,
    path: str,
    body: object = None,
    headers: dict[str, str] | None = None,
) -> Reply:
    """Sends one request; `body` is bytes, or becomes JSON."""
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    with closing(http.client.HTTPConnection(host.http_url, timeout=DEADLINE)) as connection:
        connection.request(method, path, data, headers or {})
        response = connection.getresponse()
        return Reply(response.status, response.headers, response.read())


def complete(host: RunningHost, prompt: object, **fields: object) -> Reply:
    """Asks `letters` for a completion, or the model of `fields`."""
    return send(host, "POST", "/v1/completions", {"model": "letters", "prompt": prompt, **fields})


def chat(host: RunningHost, content: object, **fields: object) -> Reply:
    """Asks `letters` for a chat with one message, or the model of `fields`."""
    messages = [{"role": "user", "content": content}]
    return send(
        host, "POST", "/v1/chat/completions", {"model": "letters", "messages": messages, **fields}
    )
