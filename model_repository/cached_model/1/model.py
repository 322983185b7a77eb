"""Finds the largest prime factor of a number. It is slow, and the result is always the same."""

import numpy as np

import triton_python_backend_utils as pb_utils


def largest_factor(number):
    factor = 2
    while factor * factor <= number:
        if number % factor:
            factor += 1
        else:
            number //= factor
    return number


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            number = int(pb_utils.get_input_tensor_by_name(request, "N").as_numpy()[0])
            if number < 2:
                error = pb_utils.TritonError(f"N must be at least 2, got {number}")
                responses.append(pb_utils.InferenceResponse(error=error))
                continue
            factor = np.array([largest_factor(number)], dtype=np.int64)
            tensor = pb_utils.Tensor("LARGEST_FACTOR", factor)
            responses.append(pb_utils.InferenceResponse([tensor]))
        return responses
