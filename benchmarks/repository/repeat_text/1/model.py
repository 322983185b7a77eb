"""Sends as many words as its input says."""

import numpy as np

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            array = np.array([b" word"], dtype=np.object_)
            for _ in range(int(request.inputs()[0].as_numpy()[0])):
                tensor = pb_utils.Tensor("text_output", array)
                sender.send(pb_utils.InferenceResponse([tensor]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
