"""Writes texts byte by byte. The scheduler batches the next step of all texts."""

import network
from texts import Text, step

import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
AGAIN = pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE
MOST_TEXTS = 64  # max_candidate_sequences of the configuration


class TritonPythonModel:
    def initialize(self, args):
        self.network = network.Network(seed=1)
        self.texts = {}  # by the id that the server gives each request; the last run comes last

    def execute(self, requests):
        """Add one token to the text of each request, and ask for the request again."""
        writing = []
        for request in requests:
            text = self.texts.pop(request.correlation_id(), None) or Text(request)
            if text.left > 0 and not request.is_cancelled():
                self.texts[request.correlation_id()] = text
                writing.append((request, text))
            else:
                request.get_response_sender().send(flags=FINAL)
        if writing:
            responses = step(self.network, [text for _, text in writing])
            for response, (request, _) in zip(responses, writing, strict=True):
                if response is not None:
                    request.get_response_sender().send(response)
                request.set_release_flags(AGAIN)
        # A request whose client leaves between two steps does not come again.
        while len(self.texts) > MOST_TEXTS:
            del self.texts[next(iter(self.texts))]
