"""Reverses texts, and exports metrics: their number, their lengths and the longest one."""

import numpy as np

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        kinds = pb_utils.MetricFamily
        # The server exports a family while the model holds the object.
        self.families = [
            kinds("reversed_texts_total", "Texts that were turned round", kinds.COUNTER),
            kinds("reversed_longest_characters", "The longest text so far", kinds.GAUGE),
            kinds("reversed_characters", "How long the texts are", kinds.HISTOGRAM),
        ]
        texts, longest, characters = self.families
        labels = {"model": args["model_name"], "version": args["model_version"]}
        self.texts = texts.Metric(labels=labels)
        self.longest = longest.Metric(labels=labels)
        self.characters = characters.Metric(labels=labels, buckets=[1, 10, 100, 1000])

    def execute(self, requests):
        responses = []
        for request in requests:
            tensor = pb_utils.get_input_tensor_by_name(request, "TEXT")
            texts = [text.decode() for text in tensor.as_numpy()]
            self.texts.increment(len(texts))
            for text in texts:
                self.characters.observe(len(text))
                self.longest.set(max(self.longest.value(), len(text)))
            turned = np.array([text[::-1].encode() for text in texts], dtype=np.object_)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("REVERSED", turned)]))
        return responses
