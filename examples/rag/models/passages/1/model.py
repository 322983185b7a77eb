"""Finds the two passages whose embeddings are nearest. A vector database goes here."""

from pathlib import Path

import numpy as np

import triton_python_backend_utils as pb_utils

COUNT = 2
BATCH = 32  # max_batch_size of the embedder


class TritonPythonModel:
    def initialize(self, args):
        file = Path(args["model_repository"], args["model_version"], "passages.txt")
        self.passages = np.array(file.read_bytes().splitlines(), np.object_)
        self.vectors = None  # models cannot call others while they are loaded

    def execute(self, requests):
        if self.vectors is None:
            starts = range(0, len(self.passages), BATCH)
            parts = [embed(self.passages[start : start + BATCH]) for start in starts]
            self.vectors = np.concatenate(parts)
        inputs = [pb_utils.get_input_tensor_by_name(r, "EMBEDDING").as_numpy() for r in requests]
        scores = np.concatenate(inputs) @ self.vectors.T
        best = np.argsort(-scores, axis=1)[:, :COUNT]
        scores = np.take_along_axis(scores, best, axis=1)
        ends = np.cumsum([len(rows) for rows in inputs])[:-1]
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("PASSAGES", self.passages[rows]), pb_utils.Tensor("SCORES", part)]
            )
            for rows, part in zip(np.split(best, ends), np.split(scores, ends), strict=True)
        ]


def embed(texts):
    """Return the embeddings of some passages, by the model that embeds the questions."""
    bls_request = pb_utils.InferenceRequest(
        model_name="embedder",
        inputs=[pb_utils.Tensor("text", texts.reshape(-1, 1))],
        requested_output_names=["embedding"],
    )
    bls_response = bls_request.exec()
    if bls_response.has_error():
        raise pb_utils.TritonModelException(bls_response.error().message())
    return pb_utils.get_output_tensor_by_name(bls_response, "embedding").as_numpy()
