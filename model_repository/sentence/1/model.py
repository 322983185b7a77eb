"""Joins the tokens that `generate` streams to one sentence, then cancels the stream."""

import numpy as np

import triton_python_backend_utils as pb_utils

MOST_TOKENS = np.array([500], dtype=np.int32)


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        question = pb_utils.InferenceRequest(
            model_name="generate",
            requested_output_names=["TOKEN"],
            inputs=[*request.inputs(), pb_utils.Tensor("MAX_TOKENS", MOST_TOKENS)],
        )
        text = pb_utils.get_input_tensor_by_name(request, "PROMPT").as_numpy()[0].decode()
        count = 0
        responses = question.exec(decoupled=True)
        for response in responses:
            if response.has_error():
                return pb_utils.InferenceResponse(error=response.error())
            tensor = pb_utils.get_output_tensor_by_name(response, "TOKEN")
            if tensor is None:  # the final response, without a token
                break
            text += tensor.as_numpy()[0].decode()
            count += 1
            if text.endswith((".", "!", "?")):
                responses.cancel()  # otherwise `generate` would continue
                break
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("SENTENCE", np.array([text.encode()], dtype=np.object_)),
                pb_utils.Tensor("TOKENS", np.array([count], dtype=np.int32)),
            ]
        )
