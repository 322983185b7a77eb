"""Returns every input, of any type: strings, integers, floats, booleans, an image."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            outputs = [
                pb_utils.Tensor(tensor.name().replace("_IN", "_OUT"), tensor.as_numpy())
                for tensor in request.inputs()
            ]
            responses.append(pb_utils.InferenceResponse(outputs))
        return responses
