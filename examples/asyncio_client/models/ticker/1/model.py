"""Counts at an interval, until its client leaves."""

import asyncio

import numpy as np

import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    async def execute(self, requests):
        await asyncio.gather(*(self.tick(request) for request in requests))

    async def tick(self, request):
        sender = request.get_response_sender()
        (seconds,) = pb_utils.get_input_tensor_by_name(request, "EVERY").as_numpy()
        count = 0
        while not sender.is_cancelled():
            count += 1
            tick = pb_utils.Tensor("TICK", np.array([count], np.int32))
            sender.send(pb_utils.InferenceResponse([tick]))
            await asyncio.sleep(float(seconds))
        sender.send(flags=FINAL)
