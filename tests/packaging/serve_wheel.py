"""Serves a model from an installed wheel, like a user. Run it with the Python of that environment.

`python serve_wheel.py` in an empty folder writes a model, starts `pbhost serve`, sends a request
over gRPC and stops the server. It exits with 0 if everything was as expected.
"""

from __future__ import annotations

import os
import queue
import re
import subprocess
import sys
import threading
from pathlib import Path

MODEL = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [-1]})
        config.add_output({"name": "Y", "data_type": "TYPE_FP32", "dims": [-1]})
        return config

    def execute(self, requests):
        tensors = [pb_utils.get_input_tensor_by_name(r, "X").as_numpy() for r in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", x * 2)]) for x in tensors]
"""
DEADLINE = 60.0


def main() -> int:
    """Serves, asks, stops; returns the exit status."""
    import numpy as np
    import tritonclient.grpc as grpcclient

    folder = Path("models/double/1")
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(MODEL)
    command = [str(Path(sys.executable).with_name("pbhost")), "serve"]
    flags = ["--model-repository=models", "--grpc-port=0", "--http-port=0", "--metrics-port=0"]
    server = subprocess.Popen(
        [*command, *flags], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        assert server.stdout is not None
        for line in server.stdout:
            lines.put(line)
        lines.put("")

    threading.Thread(target=read, daemon=True).start()
    try:
        while True:
            line = lines.get(timeout=DEADLINE)
            print(line, end="")
            if not line:
                return 1
            if started := re.search(r"Started GRPCInferenceService at \S+:(\d+)", line):
                break
        x = np.array([1, 2, 3], dtype=np.float32)
        with grpcclient.InferenceServerClient(f"localhost:{started[1]}") as client:
            tensor = grpcclient.InferInput("X", x.shape, "FP32").set_data_from_numpy(x)
            y = client.infer("double", [tensor], client_timeout=DEADLINE).as_numpy("Y")
        print(y)
        if y is None or y.tolist() != [2, 4, 6]:
            return 1
    finally:
        server.terminate()
        status = server.wait(DEADLINE)
    print(f"python {sys.version.split()[0]}, cwd {os.getcwd()}, exit status {status}")
    return status


if __name__ == "__main__":
    sys.exit(main())
