"""Client of `vit_python` and `vit_ensemble`: sends the same image to both, compares the results."""

import argparse

import numpy as np
import tritonclient.grpc as grpcclient


def image(height: int = 300, width: int = 400) -> np.ndarray:
    """An image of waves in three colours."""
    y, x = np.mgrid[:height, :width]
    waves = [np.sin(x / 20), np.sin(y / 30), np.sin((x + y) / 40)]
    return (np.stack(waves, axis=-1) * 127 + 128).astype(np.uint8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="localhost:8001")
    given = image()
    answers = []
    with grpcclient.InferenceServerClient(parser.parse_args().url) as client:
        for model in ("vit_python", "vit_ensemble"):
            tensor = grpcclient.InferInput("IMAGE", given.shape, "UINT8")
            result = client.infer(model, [tensor.set_data_from_numpy(given)])
            answers.append(result.as_numpy("HIDDEN"))
            print(f"{model}: {answers[-1].shape}")
    print("equal:", np.allclose(*answers, atol=1e-4))


if __name__ == "__main__":
    main()
