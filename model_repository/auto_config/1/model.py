"""Counts words. There is no config.pbtxt: the model declares its inputs and outputs itself."""

import numpy as np

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "TEXT", "data_type": "TYPE_STRING", "dims": [1]})
        config.add_output({"name": "WORDS", "data_type": "TYPE_INT32", "dims": [1]})
        config.set_max_batch_size(16)
        config.set_dynamic_batching()
        return config

    def execute(self, requests):
        responses = []
        for request in requests:
            texts = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()
            words = np.array([[len(text.split())] for (text,) in texts], dtype=np.int32)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("WORDS", words)]))
        return responses
