"""Classifies texts by a pipeline of Hugging Face, on a GPU if the instance has one."""

from pathlib import Path

import numpy as np
from transformers import pipeline

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        on_gpu = args["model_instance_kind"] == "GPU"
        self.classify = pipeline(
            "text-classification",
            model=str(Path(args["model_repository"], args["model_version"], "network")),
            device=f"cuda:{args['model_instance_device_id']}" if on_gpu else "cpu",
        )

    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(r, "TEXT").as_numpy()[:, 0] for r in requests]
        # What is not UTF-8 must not fail the requests of others in the batch.
        texts = [text.decode(errors="replace") for rows in inputs for text in rows]
        answers = iter(self.classify(texts, batch_size=len(texts), truncation=True))
        return [self.respond([next(answers) for _ in rows]) for rows in inputs]

    def respond(self, answers):
        labels = np.array([[answer["label"].encode()] for answer in answers], np.object_)
        scores = np.array([[answer["score"]] for answer in answers], np.float32)
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor("LABEL", labels), pb_utils.Tensor("SCORE", scores)]
        )
