"""Client of `sentence`: gets one response, which is made from another model's stream."""

import argparse

import numpy as np
import tritonclient.grpc as grpcclient


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="localhost:8001")
    url = parser.parse_args().url
    with grpcclient.InferenceServerClient(url) as client:
        for prompt, seed in (("The rabbit-hole", 4), ("Oh dear", 0)):
            array = np.array([prompt.encode()], dtype=np.object_)
            number = np.array([seed], dtype=np.int64)
            inputs = [
                grpcclient.InferInput("PROMPT", [1], "BYTES").set_data_from_numpy(array),
                grpcclient.InferInput("SEED", [1], "INT64").set_data_from_numpy(number),
            ]
            result = client.infer("sentence", inputs)
            sentence = result.as_numpy("SENTENCE")[0].decode()
            print(f"{result.as_numpy('TOKENS')[0]} tokens: {sentence}")


if __name__ == "__main__":
    main()
