"""Calls the model that the request names, `name` or `name:version`, and returns its response
unchanged."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        target = pb_utils.get_input_tensor_by_name(request, "MODEL").as_numpy()[0].decode()
        tensor = pb_utils.get_input_tensor_by_name(request, "INPUT0")
        first, _, rest = target.partition(">")
        name, _, version = first.partition(":")
        inputs = [tensor]
        if rest:
            import numpy as np

            inputs.append(pb_utils.Tensor("MODEL", np.array([rest.encode()], dtype=object)))
        return pb_utils.InferenceRequest(
            model_name=name,
            model_version=int(version or -1),
            inputs=inputs,
            requested_output_names=["OUTPUT0"],
        ).exec()
