"""Sums the values of each sequence. The server keeps the state, not the model."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            value = pb_utils.get_input_tensor_by_name(request, "VALUE").as_numpy()
            total = pb_utils.get_input_tensor_by_name(request, "TOTAL").as_numpy()
            tensors = [
                pb_utils.Tensor("SUM", total + value),
                pb_utils.Tensor("NEW_TOTAL", total + value),
            ]
            responses.append(pb_utils.InferenceResponse(tensors))
        return responses
