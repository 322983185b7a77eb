"""The pipeline of `text_reader` as Python code: without text, it skips the recognition."""

import numpy as np

import triton_python_backend_utils as pb_utils


def ask(model, outputs, *inputs):
    """Call a model and return these outputs."""
    request = pb_utils.InferenceRequest(
        model_name=model, requested_output_names=outputs, inputs=list(inputs)
    )
    response = request.exec()
    if response.has_error():
        error = response.error()
        raise Refused(pb_utils.TritonError(error.message(), error.code()))
    return [pb_utils.get_output_tensor_by_name(response, output) for output in outputs]


class Refused(Exception):
    """A step has failed. Only this request fails."""

    def __init__(self, error):
        super().__init__(error.message())
        self.error = error


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        try:
            return pb_utils.InferenceResponse(self.read(request))
        except Refused as refused:
            return pb_utils.InferenceResponse(error=refused.error)

    def read(self, request):
        image = pb_utils.get_input_tensor_by_name(request, "IMAGE")
        (picture,) = ask("text_prepare", ["PICTURE"], image)
        (heat,) = ask("text_detector", ["HEAT"], picture)
        boxes, crops = ask("text_crop", ["BOXES", "CROPS"], picture, heat)
        if len(boxes.as_numpy()) == 0:
            return [boxes, pb_utils.Tensor("TEXT", np.array([], dtype=np.object_))]
        (chances,) = ask("text_recogniser", ["CHANCES"], crops)
        return [boxes, *ask("text_decode", ["TEXT"], chances)]
