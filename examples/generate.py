"""Client of `generate`: prints the tokens of a text as they arrive."""

import argparse

import pbhost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="localhost:8001")
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--seed", type=int, default=8)
    parser.add_argument("prompt", nargs="?", default="Alice was")
    arguments = parser.parse_args()
    with pbhost.Client(arguments.url) as client:
        print(arguments.prompt, end="", flush=True)
        for part in client.stream(
            "generate",
            PROMPT=arguments.prompt,
            MAX_TOKENS=arguments.tokens,
            SEED=arguments.seed,
        ):
            print(part["TOKEN"][0].decode(), end="", flush=True)
    print()


if __name__ == "__main__":
    main()
