"""Compares vectors by the cosine of the angle between them."""

import numpy as np

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        a, b = (
            [pb_utils.get_input_tensor_by_name(request, name).as_numpy() for request in requests]
            for name in "AB"
        )
        ends = np.cumsum([len(rows) for rows in a])[:-1]
        cosines = np.split(cosine(np.concatenate(a), np.concatenate(b)), ends)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("COSINE", part)]) for part in cosines]


def cosine(a, b):
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return ((a * b).sum(axis=1) / lengths).reshape(-1, 1)
