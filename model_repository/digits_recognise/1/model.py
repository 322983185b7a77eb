"""Recognises seven-segment digits by the segments that are lit."""

import numpy as np

import triton_python_backend_utils as pb_utils

# Where to look for each segment, away from its ends: rows and columns of 32 by 20.
SEGMENTS = {
    "top": (slice(0, 4), slice(7, 13)),
    "middle": (slice(14, 18), slice(7, 13)),
    "bottom": (slice(28, 32), slice(7, 13)),
    "upper left": (slice(6, 12), slice(0, 4)),
    "upper right": (slice(6, 12), slice(16, 20)),
    "lower left": (slice(20, 26), slice(0, 4)),
    "lower right": (slice(20, 26), slice(16, 20)),
}
LIT = {  # in the order of the segments above
    "1011111": b"0", "0000101": b"1", "1110110": b"2", "1110101": b"3", "0101101": b"4",
    "1111001": b"5", "1111011": b"6", "1000101": b"7", "1111111": b"8", "1111101": b"9",
}  # fmt: skip


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        crops = pb_utils.get_input_tensor_by_name(request, "CROPS").as_numpy()
        digits = np.array([self.read(picture) for picture in crops], dtype=np.object_)
        return pb_utils.InferenceResponse([pb_utils.Tensor("DIGITS", digits)])

    def read(self, picture):
        lit = "".join(str(int(picture[place].mean() > 127)) for place in SEGMENTS.values())
        return LIT.get(lit, b"?")
