"""Generates text token by token. Requests of one instance run concurrently as coroutines."""

import asyncio
import json
import os

import ngrams
import numpy as np

import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def value_of(request, name, default):
    """The only element of an optional input, or the default."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return default if tensor is None else tensor.as_numpy()[0]


class TritonPythonModel:
    def initialize(self, args):
        with open(os.path.join(args["model_repository"], "corpus.txt")) as file:
            self.model = ngrams.NGrams(file.read())
        parameters = json.loads(args["model_config"])["parameters"]
        self.pause = float(parameters["milliseconds_per_token"]["string_value"]) / 1000

    async def execute(self, requests):
        await asyncio.gather(*(self.answer(request) for request in requests))

    async def answer(self, request):
        sender = request.get_response_sender()
        prompt = value_of(request, "PROMPT", b"").decode()
        left = int(value_of(request, "MAX_TOKENS", 50))
        for token in self.model.generate(prompt, int(value_of(request, "SEED", 0))):
            if left <= 0 or sender.is_cancelled():
                break
            left -= 1
            tensor = pb_utils.Tensor("TOKEN", np.array([token.encode()], dtype=np.object_))
            sender.send(pb_utils.InferenceResponse([tensor]))
            await asyncio.sleep(
                self.pause
            )  # a real network would compute here; other requests may run
        sender.send(flags=FINAL)
