"""Embeds texts by their pairs of letters, projected to 64 dimensions by a random matrix."""

import numpy as np

import triton_python_backend_utils as pb_utils

PAIRS, WIDTH = 4096, 64


class TritonPythonModel:
    def initialize(self, args):
        random = np.random.default_rng(1)
        self.projection = random.standard_normal((PAIRS, WIDTH)).astype(np.float32)

    def execute(self, requests):
        batches = [
            pb_utils.get_input_tensor_by_name(request, "text").as_numpy().reshape(-1)
            for request in requests
        ]
        vectors = self.embed(np.concatenate(batches))
        ends = np.cumsum([len(batch) for batch in batches])[:-1]
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("embedding", part)])
            for part in np.split(vectors, ends)
        ]

    def embed(self, texts):
        """Return unit vectors, shape [text, 64]."""
        counts = np.zeros((len(texts), PAIRS), np.float32)
        for row, text in enumerate(texts):
            letters = np.frombuffer(b" " + text.lower() + b" ", np.uint8).astype(int)
            np.add.at(counts[row], (letters[:-1] * 61 + letters[1:]) % PAIRS, 1)
        vectors = counts @ self.projection
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
