"""Runs the Python source in the request, and returns its result as JSON.

A script that awaits something runs as a coroutine; `execute` is then a coroutine too.
"""

import json
import textwrap
import threading

import numpy as np

import triton_python_backend_utils as pb_utils


def answer(value):
    array = np.array([json.dumps(value).encode()], dtype=np.object_)
    return pb_utils.InferenceResponse([pb_utils.Tensor("ANSWER", array)])


def tensor(name, value):
    return pb_utils.Tensor(name, np.asarray(value))


def command(text):
    return pb_utils.Tensor("COMMAND", np.array([text.encode()], dtype=np.object_))


def ask(model, *inputs, outputs=(), **options):
    return pb_utils.InferenceRequest(
        inputs=list(inputs), requested_output_names=list(outputs), model_name=model, **options
    )


def until(condition, what):
    pause = threading.Event()
    for _ in range(12_000):  # two minutes
        if condition():
            return
        pause.wait(0.01)
    raise TimeoutError(f"waited two minutes in vain for {what}")


def numbers(responses):
    """The numbers of a stream; None for a response without one, a text for an error."""
    found = []
    for response in responses:
        if response.has_error():
            found.append(response.error().message())
        else:
            number = pb_utils.get_output_tensor_by_name(response, "NUMBER")
            found.append(None if number is None else int(number.as_numpy()[0]))
    return found


class TritonPythonModel:
    def execute(self, requests):
        assert len(requests) == 1
        text = pb_utils.get_input_tensor_by_name(requests[0], "COMMAND").as_numpy()[0].decode()
        kind = "async def" if "await " in text or "async " in text else "def"
        source = f"{kind} script(self, request):\n" + textwrap.indent(textwrap.dedent(text), " ")
        names = dict(globals())
        exec(source, names)
        returned = names["script"](self, requests[0])
        return self.finish(returned) if kind == "async def" else [answer(returned)]

    async def finish(self, coroutine):
        return [answer(await coroutine)]
