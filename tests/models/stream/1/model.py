"""Answers through its senders, step by step as it is told: `[thread:]step step ...`."""

import os
import signal
import threading

import numpy as np

import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def number(value, size=0):
    outputs = [pb_utils.Tensor("NUMBER", np.array([value], dtype=np.int32))]
    if size:
        outputs.append(pb_utils.Tensor("DATA", np.zeros(size, dtype=np.uint8)))
    return pb_utils.InferenceResponse(outputs)


def until(condition, what):
    pause = threading.Event()
    for _ in range(12_000):  # two minutes
        if condition():
            return
        pause.wait(0.01)
    raise TimeoutError(f"waited two minutes in vain for {what}")


class Answers:
    def __init__(self, sender, model):
        self.sender = sender
        self.model = model
        self.sent = 0

    def act(self, steps):
        for step in steps:
            name, _, argument = step.partition("=")
            getattr(self, name.replace("-", "_"))(argument)

    def respond(self, size):
        self.sender.send(number(self.sent, int(size or 0)))
        self.sent += 1

    def many(self, count):
        for _ in range(int(count)):
            self.respond(0)

    def last(self, _):
        self.sender.send(number(self.sent), flags=FINAL)

    def final(self, _):
        self.sender.send(flags=FINAL)

    def error(self, text):
        self.sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(text)))

    def last_error(self, text):
        error = pb_utils.TritonError(text, pb_utils.TritonError.NOT_FOUND)
        self.sender.send(pb_utils.InferenceResponse(error=error), flags=FINAL)

    def refused(self, step):
        """That step must raise; its text is logged."""
        try:
            if step == "flag":
                self.sender.send(number(0), flags=2)
            elif step == "nothing":
                self.sender.send()
            else:
                getattr(self, step)("")
        except pb_utils.TritonModelException as error:
            pb_utils.Logger.log_info(f"refused: {error}")
        else:
            raise AssertionError(f"{step} was not refused")

    def raises(self, text):
        raise ValueError(text)

    def dies(self, _):
        os.kill(os.getpid(), signal.SIGKILL)

    def keeps(self, _):
        self.model.kept.append(self.sender)

    def releases(self, _):
        self.model.kept.clear()

    def cancelled(self, _):
        pb_utils.Logger.log_info("waits to be cancelled")
        until(self.sender.is_cancelled, "the request to be cancelled")
        pb_utils.Logger.log_info("was cancelled")


class TritonPythonModel:
    def initialize(self, args):
        self.kept = []
        self.threads = []

    def execute(self, requests):
        for request in requests:
            text = pb_utils.get_input_tensor_by_name(request, "COMMAND").as_numpy()[0].decode()
            where, _, steps = text.rpartition(":")
            act = Answers(request.get_response_sender(), self).act
            if where == "thread":
                thread = threading.Thread(target=act, args=(steps.split(),))
                self.threads.append(thread)
                thread.start()
            elif where == "return":
                act(steps.split())
                return [number(100)] * len(requests)
            else:
                act(steps.split())

    def finalize(self):
        for thread in self.threads:
            thread.join()
        print("finalize has run")
