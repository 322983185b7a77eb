"""Sends the numbers of `IN` back one by one: number i in OUT, and i in IDX.

`DELAY` is the milliseconds to wait before each response, `WAIT` before `execute` returns. A thread
sends the responses, so a long request does not delay others and may continue after `execute` has
returned.
"""

import threading
import time

import numpy as np

import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def initialize(self, args):
        self.under_way = 0
        self.changed = threading.Condition()

    def execute(self, requests):
        wait = 0
        for request in requests:
            sender = request.get_response_sender()
            numbers = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            delays = pb_utils.get_input_tensor_by_name(request, "DELAY").as_numpy()
            wait = max(wait, pb_utils.get_input_tensor_by_name(request, "WAIT").as_numpy()[0])
            if numbers.shape != delays.shape:
                text = f"IN has {numbers.size} elements, but DELAY has {delays.size}"
                error = pb_utils.TritonError(text, pb_utils.TritonError.INVALID_ARG)
                response = pb_utils.InferenceResponse(error=error)
                sender.send(response, flags=FINAL)
                continue
            with self.changed:
                self.under_way += 1
            threading.Thread(target=self.answer, args=(sender, numbers, delays)).start()
        time.sleep(wait / 1000)
        return None  # the threads send the responses

    def answer(self, sender, numbers, delays):
        try:
            self.send(sender, numbers, delays)
        finally:
            with self.changed:
                self.under_way -= 1
                self.changed.notify_all()

    def send(self, sender, numbers, delays):
        for index, number in enumerate(numbers):
            time.sleep(delays[index] / 1000)
            if sender.is_cancelled():
                break
            outputs = [
                pb_utils.Tensor("OUT", np.array([number], dtype=np.int32)),
                pb_utils.Tensor("IDX", np.array([index], dtype=np.uint32)),
            ]
            sender.send(pb_utils.InferenceResponse(outputs))
        sender.send(flags=FINAL)

    def finalize(self):
        with self.changed:
            self.changed.wait_for(lambda: self.under_way == 0)
