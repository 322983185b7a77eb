"""A text in progress: its prompt, what is left to write, and its key-value cache."""

import network
import numpy as np

import triton_python_backend_utils as pb_utils

LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz ,.", np.uint8)


def value_of(request, name, default):
    """Return the only element of an optional input, or the default."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return default if tensor is None else tensor.as_numpy().reshape(-1)[0]


class Text:
    """The text of one request. Its next token comes from `advance`."""

    def __init__(self, request):
        prompt = bytes(value_of(request, "prompt", b""))[-network.CONTEXT // 2 :] or b" "
        self.prompt_tokens = len(prompt)
        self.waiting = list(prompt)  # tokens that the network has not seen
        self.left = min(
            int(value_of(request, "max_tokens", 40)), network.CONTEXT - self.prompt_tokens
        )
        self.temperature = float(value_of(request, "temperature", 1.0))
        self.random = np.random.default_rng(abs(int(value_of(request, "seed", 0))))
        self.cache = network.Cache()

    def advance(self, scores):
        """Take the scores that follow the last token; return the response with the next one.

        Return None while the network has not seen the whole prompt.
        """
        if self.waiting:
            return None
        token = self.choose(scores)
        self.waiting.append(token)
        self.left -= 1
        parameters = {"prompt_tokens": self.prompt_tokens, "completion_tokens": 1}
        if self.left == 0:
            parameters["finish_reason"] = "length"
        tensor = pb_utils.Tensor("text", np.array([bytes([token])], dtype=np.object_))
        return pb_utils.InferenceResponse([tensor], parameters=parameters)

    def choose(self, scores):
        """Return the next byte, of the letters only: the weights are random."""
        scores = scores[LETTERS]
        if self.temperature == 0:
            return int(LETTERS[scores.argmax()])
        chances = network.softmax(scores / self.temperature).astype(np.float64)
        return int(self.random.choice(LETTERS, p=chances / chances.sum()))


def step(net, texts):
    """Add one token to each text; return a response, or None, for each."""
    tokens = [text.waiting.pop(0) for text in texts]
    scores = net.step(tokens, [text.cache for text in texts])
    return [text.advance(row) for text, row in zip(texts, scores, strict=True)]
