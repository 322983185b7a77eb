"""Client of `elements`: looks up the atoms of table salt and of water."""

import argparse

import numpy as np
import tritonclient.grpc as grpcclient


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="localhost:8001")
    url = parser.parse_args().url
    with grpcclient.InferenceServerClient(url) as client:
        for atoms in ([b"Na", b"Cl"], [b"H", b"H", b"O"]):
            symbols = np.array(atoms, dtype=np.object_)
            tensor = grpcclient.InferInput("SYMBOL", symbols.shape, "BYTES")
            result = client.infer("elements", [tensor.set_data_from_numpy(symbols)])
            names = ", ".join(name.decode() for name in result.as_numpy("NAME"))
            print(f"{names}: together {result.as_numpy('WEIGHT').sum():.3f} u")


if __name__ == "__main__":
    main()
