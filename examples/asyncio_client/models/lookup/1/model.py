"""Looks up cities. A coroutine, so that requests wait for the database at the same time."""

import asyncio

import numpy as np

import triton_python_backend_utils as pb_utils

POPULATIONS = {b"Lima": 10_151_000, b"Oslo": 717_710, b"Riga": 605_273, b"Suva": 93_970}


class TritonPythonModel:
    async def execute(self, requests):
        return await asyncio.gather(*(self.respond(request) for request in requests))

    async def respond(self, request):
        cities = pb_utils.get_input_tensor_by_name(request, "CITY").as_numpy()
        await asyncio.sleep(0.01)  # a database
        unknown = [city.decode() for city in cities[:, 0] if city not in POPULATIONS]
        if unknown:
            error = pb_utils.TritonError(
                f"no such city: {unknown[0]}", pb_utils.TritonError.NOT_FOUND
            )
            return pb_utils.InferenceResponse(error=error)
        found = np.array([[POPULATIONS[city]] for city in cities[:, 0]], np.int64)
        return pb_utils.InferenceResponse([pb_utils.Tensor("POPULATION", found)])
