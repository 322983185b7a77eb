"""Client of `repeat`: sends one request and prints each of its responses as it arrives."""

import argparse

import pbhost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="localhost:8001")
    url = parser.parse_args().url
    delays = [100, 200, 300, 400]  # milliseconds
    with pbhost.Client(url) as client:
        for part in client.stream("repeat", IN=[4, 2, 0, 1], DELAY=delays, WAIT=0):
            print(f"response {part['IDX'][0]}: {part['OUT'][0]}", flush=True)
    print("that was all")


if __name__ == "__main__":
    main()
