"""Client of `stateful_accumulator`: runs two sequences at the same time, each with its own sum."""

import argparse

import pbhost

VALUES = {"anna": [1, 2, 3], "bert": [100, 50, 25]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="localhost:8001")
    with pbhost.Client(parser.parse_args().url) as client:
        sequences = {
            name: client.sequence("stateful_accumulator", sequence_id=name) for name in VALUES
        }
        for step in range(3):
            for name, values in VALUES.items():
                result = sequences[name].infer(VALUE=values[step], end=step == 2)
                print(f"{name}: {result['SUM'][0][0]}")


if __name__ == "__main__":
    main()
