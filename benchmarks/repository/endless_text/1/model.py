"""Sends words until its client leaves. The prompt `count` gets the number of texts in progress."""

import asyncio

import numpy as np

import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
PAUSE = 0.02  # seconds between two words


def text(value):
    array = np.array([value.encode()], dtype=np.object_)
    return pb_utils.InferenceResponse([pb_utils.Tensor("text_output", array)])


class TritonPythonModel:
    def initialize(self, args):
        self.in_progress = 0

    async def execute(self, requests):
        await asyncio.gather(*map(self.answer, requests))

    async def answer(self, request):
        sender = request.get_response_sender()
        if request.inputs()[0].as_numpy()[0] == b"count":
            sender.send(text(str(self.in_progress)), flags=FINAL)
            return
        self.in_progress += 1
        while not sender.is_cancelled():
            sender.send(text(" word"))
            await asyncio.sleep(PAUSE)
        self.in_progress -= 1
        sender.send(flags=FINAL)
