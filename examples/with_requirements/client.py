"""Client of `readable`: converts sizes to readable text."""

import argparse

import pbhost

SIZES = [1, 4096, 3 * 10**9]

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="localhost:8001")
with pbhost.Client(parser.parse_args().url) as client:
    texts = client.infer("readable", BYTES=SIZES)["TEXT"]
for size, text in zip(SIZES, texts, strict=True):
    print(f"{size} bytes are {text.decode()}")
