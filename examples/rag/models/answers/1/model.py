"""Answers questions from passages: embeds the question, searches, and streams what is written."""

import asyncio

import numpy as np

import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    async def execute(self, requests):
        await asyncio.gather(*(self.answer(request) for request in requests))

    async def answer(self, request):
        sender = request.get_response_sender()
        try:
            await self.stream_answer(request, sender)
        except pb_utils.TritonModelException as error:
            sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error))))
        sender.send(flags=FINAL)

    async def stream_answer(self, request, sender):
        question = pb_utils.get_input_tensor_by_name(request, "prompt").as_numpy()
        found = await call("embedder", "embedding", text=question.reshape(1, 1))
        found = await call("passages", "PASSAGES", EMBEDDING=found)
        source = b"\n".join(found[0])
        prompt = np.array([source + b"\n" + question[0]], np.object_)
        responses = await bls_request("writer", "text", prompt=prompt).async_exec(decoupled=True)
        async for response in responses:
            if sender.is_cancelled():
                responses.cancel()
                return
            if response.output_tensors() or response.has_error():  # the last one may be empty
                text = pb_utils.Tensor("text", output(response, "text"))
                told = pb_utils.Tensor("source", np.array([source], np.object_))
                sender.send(pb_utils.InferenceResponse([text, told]))


def bls_request(model, wanted, **arrays):
    return pb_utils.InferenceRequest(
        model_name=model,
        inputs=[pb_utils.Tensor(name, array) for name, array in arrays.items()],
        requested_output_names=[wanted],
    )


async def call(model, wanted, **arrays):
    """Return an output of another model."""
    return output(await bls_request(model, wanted, **arrays).async_exec(), wanted)


def output(response, name):
    if response.has_error():
        raise pb_utils.TritonModelException(response.error().message())
    return pb_utils.get_output_tensor_by_name(response, name).as_numpy()
