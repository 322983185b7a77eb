"""Spells a word: a response for each letter."""

import numpy as np

import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            (word,) = pb_utils.get_input_tensor_by_name(request, "WORD").as_numpy()
            for letter in word.decode():
                output = pb_utils.Tensor("LETTER", np.array([letter.encode()], np.object_))
                sender.send(pb_utils.InferenceResponse([output]))
            sender.send(flags=FINAL)
