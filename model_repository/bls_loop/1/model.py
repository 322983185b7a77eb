"""Doubles an array with `add_sub` until its largest element reaches a limit.

If the largest element is negative, the signs are changed first, with the model's other output. This
shows a condition and a loop around another model in plain Python.
"""

import numpy as np

import triton_python_backend_utils as pb_utils

MOST_STEPS = 100


def ask(output, a, b):
    """Call add_sub with two arrays of shape [4] and return one output."""
    request = pb_utils.InferenceRequest(
        model_name="add_sub",
        requested_output_names=[output],
        inputs=[pb_utils.Tensor("INPUT0", a[None]), pb_utils.Tensor("INPUT1", b[None])],
    )
    response = request.exec()
    if response.has_error():
        raise pb_utils.TritonModelException(response.error().message())
    return pb_utils.get_output_tensor_by_name(response, output).as_numpy()[0]


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        value = pb_utils.get_input_tensor_by_name(request, "START").as_numpy()
        limit = pb_utils.get_input_tensor_by_name(request, "LIMIT").as_numpy()[0]
        if value.max() < 0:
            value = ask("DIFFERENCE", np.zeros_like(value), value)
        steps = 0
        while value.max() < limit and steps < MOST_STEPS:
            value = ask("SUM", value, value)
            steps += 1
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("VALUE", value),
                pb_utils.Tensor("STEPS", np.array([steps], dtype=np.int32)),
            ]
        )
