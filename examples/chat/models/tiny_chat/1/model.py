"""Writes texts byte by byte. One loop computes the next byte of all texts together."""

import queue
import threading

import network
import numpy as np

import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz ,.", np.uint8)
MOST_TEXTS = 64  # texts in one step


def value_of(request, name, default):
    """Return the only element of an optional input, or the default."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return default if tensor is None else tensor.as_numpy().reshape(-1)[0]


class Text:
    """One request: its prompt, what is written of it, and its key-value cache."""

    def __init__(self, request):
        self.sender = request.get_response_sender()
        prompt = bytes(value_of(request, "prompt", b""))[-network.CONTEXT // 2 :] or b" "
        self.prompt_tokens = len(prompt)
        self.waiting = list(prompt)  # tokens that the network has not seen
        self.left = min(
            int(value_of(request, "max_tokens", 40)), network.CONTEXT - self.prompt_tokens
        )
        self.temperature = float(value_of(request, "temperature", 1.0))
        self.random = np.random.default_rng(abs(int(value_of(request, "seed", 0))))
        self.cache = network.Cache()

    def choose(self, scores):
        """Return the next byte, of the letters only: the weights are random."""
        scores = scores[LETTERS]
        if self.temperature == 0:
            return int(LETTERS[scores.argmax()])
        chances = network.softmax(scores / self.temperature).astype(np.float64)
        return int(self.random.choice(LETTERS, p=chances / chances.sum()))

    def send(self, token):
        """Send one byte; the last one says why the text ends."""
        self.left -= 1
        parameters = {"prompt_tokens": self.prompt_tokens, "completion_tokens": 1}
        if self.left == 0:
            parameters["finish_reason"] = "length"
        tensor = pb_utils.Tensor("text", np.array([bytes([token])], dtype=np.object_))
        self.sender.send(pb_utils.InferenceResponse([tensor], parameters=parameters))


class TritonPythonModel:
    def initialize(self, args):
        self.network = network.Network(seed=1)
        self.arrived = queue.Queue()
        self.loop = threading.Thread(target=self.write_texts)
        self.loop.start()

    def execute(self, requests):
        for request in requests:
            self.arrived.put(Text(request))

    def finalize(self):
        self.arrived.put(None)
        self.loop.join()

    def write_texts(self):
        """Continuous batching: texts join and leave between two steps of the network."""
        texts = []
        while True:
            while not texts or (not self.arrived.empty() and len(texts) < MOST_TEXTS):
                text = self.arrived.get()
                if text is None:
                    return
                texts.append(text)
            texts = [text for text in texts if not self.is_finished(text)]
            if texts:
                self.step(texts)

    def is_finished(self, text):
        if text.left > 0 and not text.sender.is_cancelled():
            return False
        text.sender.send(flags=FINAL)
        return True

    def step(self, texts):
        tokens = [text.waiting.pop(0) for text in texts]
        scores = self.network.step(tokens, [text.cache for text in texts])
        for text, row in zip(texts, scores, strict=True):
            if not text.waiting:  # the whole prompt is in the cache
                token = text.choose(row)
                text.waiting.append(token)
                text.send(token)
