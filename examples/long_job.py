"""Client of `long_job`: cancels a job that takes too long, and completes a shorter one."""

import argparse

import pbhost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="localhost:8001")
    with pbhost.Client(parser.parse_args().url) as client:
        for limit, patience in ((10**11, 3), (2 * 10**6, 100)):
            print(f"primes below {limit}:")
            for count, part in enumerate(client.stream("long_job", LIMIT=limit), 1):
                print(f"  {part['PRIMES'][0]} after {100 * part['DONE'][0]:.4f} %", flush=True)
                if count == patience:
                    print("  cancelled")
                    break  # which cancels the job
            else:
                print("  finished")


if __name__ == "__main__":
    main()
