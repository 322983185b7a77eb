"""A backend with the tensors of Triton's vLLM backend, for tests without a GPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tests.conftest import RepositoryBuilder

BACKEND = '''
"""Answers with the pieces of its prompt, which are cut at "|". Some pieces are commands."""
import json
import numpy as np
import triton_python_backend_utils as pb_utils

INPUTS = [
    ("text_input", "TYPE_STRING", [1], False), ("image", "TYPE_STRING", [-1], True),
    ("stream", "TYPE_BOOL", [1], True), ("sampling_parameters", "TYPE_STRING", [1], True),
    ("exclude_input_in_output", "TYPE_BOOL", [1], True),
    ("return_finish_reason", "TYPE_BOOL", [1], True),
    ("return_cumulative_logprob", "TYPE_BOOL", [1], True),
    ("return_logprobs", "TYPE_BOOL", [1], True),
    ("return_num_input_tokens", "TYPE_BOOL", [1], True),
    ("return_num_output_tokens", "TYPE_BOOL", [1], True),
    ("embedding_request", "TYPE_STRING", [1], True),
]
OUTPUTS = [
    ("text_output", "TYPE_STRING", [-1]), ("finish_reason", "TYPE_STRING", [-1]),
    ("cumulative_logprob", "TYPE_FP32", [-1]), ("logprobs", "TYPE_STRING", [-1]),
    ("num_input_tokens", "TYPE_UINT32", [1]), ("num_output_tokens", "TYPE_UINT32", [-1]),
]
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

def texts(name, *values):
    return pb_utils.Tensor(name, np.array(values, dtype=np.object_))

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        for name, kind, dims, optional in INPUTS:
            config.add_input(
                {"name": name, "data_type": kind, "dims": dims, "optional": optional})
        for name, kind, dims in OUTPUTS:
            config.add_output({"name": name, "data_type": kind, "dims": dims})
        config.set_max_batch_size(0)
        config.set_model_transaction_policy({"decoupled": True})
        return config

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            given = {name: pb_utils.get_input_tensor_by_name(request, name)
                     for name, *_ in INPUTS}
            given = {name: tensor.as_numpy() for name, tensor in given.items() if tensor}
            if "embedding_request" in given:
                sender.send(self.embed(given))
            else:
                for outputs in self.write(given):
                    sender.send(pb_utils.InferenceResponse(outputs))
            sender.send(flags=FINAL)

    def embed(self, given):
        asked = json.loads(given["embedding_request"][0])
        size = asked.get("pooling_params", {}).get("dimensions", [2])[0]
        vector = [len(asked["input"]), 0.5, 0.25][:size]
        return pb_utils.InferenceResponse([
            texts("text_output", json.dumps(vector)),
            pb_utils.Tensor("num_input_tokens", np.array([3], dtype=np.uint32))])

    def write(self, given):
        prompt = given["text_input"][0].decode()
        sampling = json.loads(given["sampling_parameters"][0])
        assert given["exclude_input_in_output"][0]
        pieces = prompt.split("|")
        for at, piece in enumerate(pieces):
            if piece == "SAMPLING":
                pieces[at] = given["sampling_parameters"][0].decode()
            if piece == "IMAGES":
                pieces[at] = str([image.decode() for image in given["image"]])
        limit = sampling["max_tokens"]
        reason = "length" if len(pieces) > limit else "stop"
        pieces = pieces[:limit]
        if not given["stream"][0]:
            yield self.outputs(given, pieces, reason, len(prompt))
            return
        for piece in pieces[:-1]:
            yield self.outputs(given, [piece], None, len(prompt))
        yield self.outputs(given, pieces[-1:], reason, len(prompt))

    def outputs(self, given, pieces, reason, size):
        made = [texts("text_output", "".join(pieces))]
        if given["return_finish_reason"][0]:
            made.append(texts("finish_reason", str(reason)))
        if given["return_num_input_tokens"][0]:
            made.append(pb_utils.Tensor("num_input_tokens", np.asarray(size, dtype=np.uint32)))
        if given["return_num_output_tokens"][0]:
            count = np.array([len(pieces)], dtype=np.uint32)
            made.append(pb_utils.Tensor("num_output_tokens", count))
        if given["return_logprobs"][0]:
            tokens = [
                {"7": {"logprob": -2.0, "rank": 3, "decoded_token": piece},
                 "8": {"logprob": -0.5, "rank": 1, "decoded_token": "best"},
                 "9": {"logprob": -1.0, "rank": 2, "decoded_token": "next"}}
                for piece in pieces
            ]
            made.append(texts("logprobs", json.dumps(tokens)))
        return made
'''


def add_vllm_backend(folder: Path) -> str:
    """Writes the backend; returns the flag of the folder of backends."""
    (folder / "vllm").mkdir(parents=True)
    (folder / "vllm" / "model.py").write_text(BACKEND)
    return f"--backend-directory={folder}"


def add_vllm_model(
    repository: RepositoryBuilder, name: str, tokenizer: str, loras: Sequence[str] = (), **more: str
) -> None:
    """Writes a model of the backend; `more` are parameters of its configuration."""
    parameters = "".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'
        for key, value in more.items()
    )
    files = {"1/model.json": json.dumps({"model": "acme/weights", "tokenizer": tokenizer})}
    if loras:
        files["1/multi_lora.json"] = json.dumps({name: f"/loras/{name}" for name in loras})
    repository.add(name, None, f'backend: "vllm" {parameters}', files=files)
