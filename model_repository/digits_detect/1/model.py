"""Finds bright objects on dark ground: splits at empty columns, then at empty rows."""

import numpy as np

import triton_python_backend_utils as pb_utils


def runs(filled):
    """(begin, end) of each run of True in a row of booleans."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], filled, [False]]).astype(np.int8)))
    return edges.reshape(-1, 2)


def boxes(bright):
    """Top, bottom, left and right of every object, from left to right."""
    found = []
    for left, right in runs(bright.any(axis=0)):
        for top, bottom in runs(bright[:, left:right].any(axis=1)):
            found.append((top, bottom, left, right))
    return np.array(found, dtype=np.int32).reshape(-1, 4)


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        image = pb_utils.get_input_tensor_by_name(request, "IMAGE").as_numpy()
        return pb_utils.InferenceResponse([pb_utils.Tensor("BOXES", boxes(image > 127))])
