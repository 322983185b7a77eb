"""Makes a report on four temperatures from three models that run at the same time."""

import asyncio

import numpy as np

import triton_python_backend_utils as pb_utils


async def ask(model, output, **arrays):
    """Return one output of a response. Raises TritonModelException."""
    request = pb_utils.InferenceRequest(
        model_name=model,
        requested_output_names=[output],
        inputs=[pb_utils.Tensor(name, array) for name, array in arrays.items()],
    )
    response = await request.async_exec()
    if response.has_error():
        raise pb_utils.TritonModelException(response.error().message())
    return pb_utils.get_output_tensor_by_name(response, output).as_numpy()


class TritonPythonModel:
    async def execute(self, requests):
        return await asyncio.gather(*(self.answer(request) for request in requests))

    async def answer(self, request):
        celsius = pb_utils.get_input_tensor_by_name(request, "CELSIUS").as_numpy()
        note = pb_utils.get_input_tensor_by_name(request, "NOTE").as_numpy()
        values = celsius.astype(np.float32)[None]
        mean = np.full_like(values, values.mean())
        try:
            fahrenheit, deviation, words = await asyncio.gather(
                ask("multi_file", "FAHRENHEIT", CELSIUS=celsius),
                ask("add_sub", "DIFFERENCE", INPUT0=values, INPUT1=mean),
                ask("auto_config", "WORDS", TEXT=note[None]),
            )
        except pb_utils.TritonModelException as error:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error)))
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("FAHRENHEIT", fahrenheit),
                pb_utils.Tensor("DEVIATION", deviation[0]),
                pb_utils.Tensor("WORDS", words[0]),
            ]
        )
