"""Client of `identity_types`: sends every data type and compares the returned values."""

import argparse

import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.utils import np_to_triton_dtype

ARRAYS = {
    "BOOL": np.array([True, False, True]),
    "UINT8": np.array([0, 255], dtype=np.uint8),
    "UINT16": np.array([0, 65535], dtype=np.uint16),
    "UINT32": np.array([0, 2**32 - 1], dtype=np.uint32),
    "UINT64": np.array([0, 2**64 - 1], dtype=np.uint64),
    "INT8": np.array([-128, 127], dtype=np.int8),
    "INT16": np.array([-(2**15), 2**15 - 1], dtype=np.int16),
    "INT32": np.array([-(2**31), 2**31 - 1], dtype=np.int32),
    "INT64": np.array([-(2**63), 2**63 - 1], dtype=np.int64),
    "FP16": np.array([0.5, -2], dtype=np.float16),
    "FP32": np.array([0.1, 1e30], dtype=np.float32),
    "FP64": np.array([0.1, 1e300], dtype=np.float64),
    "STRING": np.array(["Grüße".encode(), b"\x00\xff", b""], dtype=np.object_),
    "IMAGE": np.linspace(0, 1, 4 * 6 * 3, dtype=np.float32).reshape(4, 6, 3),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="localhost:8001")
    url = parser.parse_args().url
    inputs = [
        grpcclient.InferInput(
            f"{name}_IN", array.shape, np_to_triton_dtype(array.dtype)
        ).set_data_from_numpy(array)
        for name, array in ARRAYS.items()
    ]
    outputs = [grpcclient.InferRequestedOutput(f"{name}_OUT") for name in ARRAYS]
    with grpcclient.InferenceServerClient(url) as client:
        result = client.infer("identity_types", inputs, outputs=outputs)
    for name, sent in ARRAYS.items():
        received = result.as_numpy(f"{name}_OUT")
        same = received.dtype == sent.dtype and np.array_equal(received, sent)
        print(f"{name:7} {str(received.dtype):8} {list(received.shape)} same: {same}")
        if not same:
            raise SystemExit(f"{name}: sent {sent}, received {received}")


if __name__ == "__main__":
    main()
