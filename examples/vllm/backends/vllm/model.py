"""Serves models of vLLM: `model.json` in the version's folder has the arguments of the engine."""

import json
import uuid
from contextlib import aclosing
from pathlib import Path

import tensors
from vllm import PoolingParams, SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        for name, kind in tensors.INPUTS.items():
            config.add_input({"name": name, "data_type": kind, "dims": [1], "optional": True})
        for name, kind in tensors.OUTPUTS.items():
            config.add_output({"name": name, "data_type": kind, "dims": [-1]})
        config.set_max_batch_size(0)
        config.set_model_transaction_policy({"decoupled": True})
        return config

    def initialize(self, args):
        folder = Path(pb_utils.get_model_dir())
        self.loras = read_loras(folder / "multi_lora.json")
        arguments = json.loads((folder / "model.json").read_text())
        self.engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

    def is_ready(self):
        return not self.engine.errored

    def finalize(self):
        self.engine.shutdown()

    async def execute(self, requests):
        for request in requests:  # always one: batches are made by the engine
            await self.answer(tensors.Request(request), request.get_response_sender())

    async def answer(self, request, sender):
        embeds = request.text("embedding_request")
        responses = self.embed(request) if embeds else self.generate(request, sender)
        try:
            async with aclosing(responses):
                async for response in responses:
                    sender.send(response)
        except Exception as error:
            sender.send(pb_utils.InferenceResponse(error=triton_error(error)))
        sender.send(flags=FINAL)

    async def generate(self, request, sender):
        """Yields one response for the whole text, or one for each piece of it."""
        prompt, streams = request.text("text_input"), request.flag("stream")
        excludes = request.flag("exclude_input_in_output", default=streams)
        if not prompt:
            raise ValueError("'text_input' is missing or empty")
        if streams and not excludes:
            raise ValueError("'stream' needs 'exclude_input_in_output': true")
        fields = json.loads(request.text("sampling_parameters") or "{}")
        lora = self.find_lora(fields.pop("lora_name", None))
        parameters = sampling_parameters(fields)
        text = tensors.Text(request, parameters.n, "" if excludes else prompt)
        pieces = self.engine.generate(prompt, parameters, uuid.uuid4().hex, lora_request=lora)
        async with aclosing(pieces):  # closing them early aborts the request in the engine
            async for piece in pieces:
                if sender.is_cancelled():
                    return
                text.add(piece)
                if streams:
                    yield text.take()
        if not streams:
            yield text.take()

    async def embed(self, request):
        fields = json.loads(request.text("embedding_request"))
        parameters = pooling_parameters(fields.get("pooling_params") or {})
        given = fields["input"]
        prompt = given if isinstance(given, str) else {"prompt_token_ids": given}
        async for output in self.engine.encode(prompt, parameters, uuid.uuid4().hex):
            yield tensors.embedding(request, output)

    def find_lora(self, name):
        if name is None:
            return None
        if name not in self.loras:
            raise ValueError(f"there is no LoRA adapter '{name}'; known: {list(self.loras)}")
        return self.loras[name]


def read_loras(file):
    """Returns the adapters of `multi_lora.json`, which has their folders by name."""
    folders = json.loads(file.read_text()) if file.exists() else {}
    return {
        name: LoRARequest(name, number, folder)
        for number, (name, folder) in enumerate(folders.items(), 1)
    }


def sampling_parameters(fields):
    structured = fields.get("structured_outputs")
    if structured is not None:  # Triton's clients send it as JSON text in the JSON text
        structured = json.loads(structured) if isinstance(structured, str) else structured
        fields = {**fields, "structured_outputs": StructuredOutputsParams(**structured)}
    return SamplingParams(**{**fields, "output_kind": RequestOutputKind.DELTA})


def pooling_parameters(fields):
    dimensions = fields.get("dimensions")
    if isinstance(dimensions, list):  # Triton's clients send an array with one number
        fields = {**fields, "dimensions": dimensions[0]}
    return PoolingParams(**{"task": "embed", **fields})


def triton_error(error):
    """Returns what a client learns: whether the request was wrong, or the engine has failed."""
    codes = pb_utils.TritonError
    if isinstance(error, EngineDeadError):
        return codes(f"the engine has died: {error}", codes.UNAVAILABLE)
    if isinstance(error, (VLLMClientError, ValueError, TypeError, KeyError)):
        return codes(str(error), codes.INVALID_ARG)
    return codes(f"{type(error).__name__}: {error}", codes.INTERNAL)
