"""Sends 16 BLS requests to identity_fp32 at once and returns one of the responses."""

import asyncio

import triton_python_backend_utils as pb_utils

CALLS = 16


class TritonPythonModel:
    async def execute(self, requests):
        return [await self.answer(request) for request in requests]

    async def answer(self, request):
        array = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
        responses = await asyncio.gather(*[self.call(array) for _ in range(CALLS)])
        for response in responses:
            if response.has_error():
                raise pb_utils.TritonModelException(response.error().message())
        array = responses[-1].output_tensors()[0].as_numpy()
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", array)])

    async def call(self, array):
        return await pb_utils.InferenceRequest(
            model_name="identity_fp32",
            requested_output_names=["OUTPUT0"],
            inputs=[pb_utils.Tensor("INPUT0", array)],
        ).async_exec()
