"""Does in `execute` whatever wrong thing it is told to."""

import ctypes
import os
import sys

import numpy as np
import triton_python_backend_utils as pb_utils


def answer(text):
    array = np.array([text.encode()], dtype=np.object_)
    return pb_utils.InferenceResponse([pb_utils.Tensor("ANSWER", array)])


class TritonPythonModel:
    def execute(self, requests):
        command = pb_utils.get_input_tensor_by_name(requests[0], "COMMAND").as_numpy()[0].decode()
        name, _, argument = command.partition(" ")
        return getattr(self, name)(argument)

    def echo(self, text):
        return [answer(text)]

    def pid(self, _):
        return [answer(str(os.getpid()))]

    def raises(self, text):
        raise ValueError(text)

    def exits(self, _):
        sys.exit("the model has had enough")

    def aborts(self, _):
        os.abort()

    def segfaults(self, _):
        ctypes.string_at(0)

    def loops(self, path):
        print("looping", flush=True)
        while True:
            pass

    def prints(self, text):
        print(text)
        print(f"{text} on stderr", file=sys.stderr)
        pb_utils.Logger.log_info(f"{text} by logger")
        return [answer("printed")]

    def returns_tuple(self, _):
        return (answer("x"),)

    def returns_too_many(self, _):
        return [answer("x"), answer("y")]

    def returns_number(self, _):
        return [5]

    def returns_none(self, _):
        return None

    def returns_unknown_output(self, _):
        array = np.array([b"x"], dtype=np.object_)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OTHER", array)])]

    def returns_error(self, code):
        error = pb_utils.TritonError("on purpose", getattr(pb_utils.TritonError, code))
        return [pb_utils.InferenceResponse(error=error)]
