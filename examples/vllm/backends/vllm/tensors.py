"""The inputs and outputs of the backend, which have the names of Triton's vLLM backend."""

import json

import numpy as np

import triton_python_backend_utils as pb_utils

INPUTS = {
    "text_input": "TYPE_STRING",
    "stream": "TYPE_BOOL",
    "sampling_parameters": "TYPE_STRING",
    "exclude_input_in_output": "TYPE_BOOL",
    "return_finish_reason": "TYPE_BOOL",
    "return_cumulative_logprob": "TYPE_BOOL",
    "return_logprobs": "TYPE_BOOL",
    "return_num_input_tokens": "TYPE_BOOL",
    "return_num_output_tokens": "TYPE_BOOL",
    "embedding_request": "TYPE_STRING",
}
OUTPUTS = {
    "text_output": "TYPE_STRING",
    "finish_reason": "TYPE_STRING",
    "cumulative_logprob": "TYPE_FP32",
    "logprobs": "TYPE_STRING",
    "num_input_tokens": "TYPE_UINT32",
    "num_output_tokens": "TYPE_UINT32",
}


class Request:
    """The inputs of a request, all of which are optional."""

    def __init__(self, request):
        self._request = request

    def text(self, name):
        value = self._value(name)
        return "" if value is None else value.decode()

    def flag(self, name, default=False):
        value = self._value(name)
        return default if value is None else bool(value)

    def _value(self, name):
        tensor = pb_utils.get_input_tensor_by_name(self._request, name)
        return None if tensor is None else tensor.as_numpy().flat[0]


class Text:
    """Collects the pieces of a text, or of `count` texts for one prompt, until they are read."""

    def __init__(self, request, count, start):
        self._request = request
        self._count = count
        self._texts = [start] * count
        self._tokens = [0] * count
        self._logprobs = [[] for _ in range(count)]
        self._sums = [0.0] * count
        self._reasons = [None] * count
        self._prompt_tokens = 0

    def add(self, piece):
        """Adds an output of the engine, which has what is new."""
        self._prompt_tokens = len(piece.prompt_token_ids or ())
        for new in piece.outputs:
            self._texts[new.index] += new.text
            self._tokens[new.index] += len(new.token_ids)
            self._logprobs[new.index] += map(alternatives, new.logprobs or ())
            self._sums[new.index] = new.cumulative_logprob or 0.0
            self._reasons[new.index] = new.finish_reason

    def take(self):
        """Returns a response with what was added since the last one."""
        wants = self._request.flag
        outputs = [strings("text_output", self._texts)]
        if wants("return_finish_reason"):
            outputs.append(strings("finish_reason", map(str, self._reasons)))
        if wants("return_cumulative_logprob"):
            outputs.append(numbers("cumulative_logprob", self._sums, np.float32))
        if wants("return_logprobs"):
            outputs.append(strings("logprobs", map(json.dumps, self._logprobs)))
        if wants("return_num_input_tokens"):
            outputs.append(numbers("num_input_tokens", [self._prompt_tokens], np.uint32))
        if wants("return_num_output_tokens"):
            outputs.append(numbers("num_output_tokens", self._tokens, np.uint32))
        self._texts = [""] * self._count
        self._tokens = [0] * self._count
        self._logprobs = [[] for _ in range(self._count)]
        return pb_utils.InferenceResponse(outputs)


def alternatives(tokens):
    """Returns the alternatives of one place by token id; the sampled token is the first one."""
    return {
        str(token): {"logprob": one.logprob, "rank": one.rank, "decoded_token": one.decoded_token}
        for token, one in tokens.items()
    }


def embedding(request, output):
    outputs = [strings("text_output", [json.dumps(output.outputs.data.tolist())])]
    if request.flag("return_num_input_tokens"):
        tokens = len(output.prompt_token_ids)
        outputs.append(numbers("num_input_tokens", [tokens], np.uint32))
    return pb_utils.InferenceResponse(outputs)


def strings(name, values):
    return pb_utils.Tensor(name, np.array(list(values), dtype=object))


def numbers(name, values, dtype):
    return pb_utils.Tensor(name, np.array(values, dtype=dtype))
