"""The pipeline of `digits` as Python code: it may stop early and use the results of each step."""

import numpy as np

import triton_python_backend_utils as pb_utils


def ask(model, output, *inputs):
    """Call a model and return one output."""
    request = pb_utils.InferenceRequest(
        model_name=model, requested_output_names=[output], inputs=list(inputs)
    )
    response = request.exec()
    if response.has_error():
        raise pb_utils.TritonModelException(response.error().message())
    return pb_utils.get_output_tensor_by_name(response, output)


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        image = pb_utils.get_input_tensor_by_name(request, "IMAGE")
        boxes = ask("digits_detect", "BOXES", image)
        if len(boxes.as_numpy()) == 0:
            digits = pb_utils.Tensor("DIGITS", np.array([], dtype=np.object_))
        else:
            crops = ask("digits_crop", "CROPS", image, boxes)
            digits = ask("digits_recognise", "DIGITS", crops)
        return pb_utils.InferenceResponse([boxes, digits])
