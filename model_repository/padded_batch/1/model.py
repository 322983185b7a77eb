"""Subtracts the mean of each sequence, for a whole batch at once in one padded matrix."""

import numpy as np

import triton_python_backend_utils as pb_utils


def values_of(request):
    return pb_utils.get_input_tensor_by_name(request, "VALUES").as_numpy().reshape(-1)


class TritonPythonModel:
    def execute(self, requests):
        # Batch inputs describe the whole batch and are the same in each request.
        lengths = pb_utils.get_input_tensor_by_name(requests[0], "LENGTHS").as_numpy()
        longest = len(pb_utils.get_input_tensor_by_name(requests[0], "LONGEST").as_numpy())

        mask = np.arange(longest) < lengths[:, np.newaxis]
        padded = np.zeros((len(requests), longest), dtype=np.float32)
        padded[mask] = np.concatenate([values_of(request) for request in requests])

        means = padded.sum(axis=1) / np.maximum(lengths, 1)
        centred = (padded - means[:, np.newaxis])[mask]

        # The first response has the outputs of all requests, joined; the server splits them.
        everything = pb_utils.Tensor("CENTRED", centred.astype(np.float32))
        first = pb_utils.InferenceResponse([everything])
        return [first] + [pb_utils.InferenceResponse() for _ in requests[1:]]
