"""Writes texts byte by byte. One loop computes the next byte of all texts together."""

import queue
import threading

import network
from texts import Text, step

import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
MOST_TEXTS = 64  # texts in one step


class TritonPythonModel:
    def initialize(self, args):
        self.network = network.Network(seed=1)
        self.arrived = queue.Queue()
        self.loop = threading.Thread(target=self.write_texts)
        self.loop.start()

    def execute(self, requests):
        for request in requests:
            self.arrived.put((Text(request), request.get_response_sender()))

    def finalize(self):
        self.arrived.put(None)
        self.loop.join()

    def write_texts(self):
        """Continuous batching: texts join and leave between two steps of the network."""
        writing = []
        while True:
            while not writing or (not self.arrived.empty() and len(writing) < MOST_TEXTS):
                arrived = self.arrived.get()
                if arrived is None:
                    return
                writing.append(arrived)
            writing = [entry for entry in writing if not self.is_finished(*entry)]
            if not writing:
                continue
            responses = step(self.network, [text for text, _ in writing])
            for response, (_, sender) in zip(responses, writing, strict=True):
                if response is not None:
                    sender.send(response)

    def is_finished(self, text, sender):
        if text.left > 0 and not sender.is_cancelled():
            return False
        sender.send(flags=FINAL)
        return True
