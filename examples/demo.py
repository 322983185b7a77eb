"""The demo of `make demo`: starts a host, runs clients against it, and stops it."""

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEADLINE = 120  # seconds for the models to load, on a slow machine
CLIENTS = ("add_sub.py", "bls_loop.py", "generate.py")


def lines_until_started(host: subprocess.Popen[str]) -> Iterator[str]:
    """Yields the output of the host up to the line with its gRPC address."""
    assert host.stdout is not None
    watchdog = threading.Timer(DEADLINE, host.kill)
    watchdog.start()
    try:
        for line in host.stdout:
            yield line
            if "Started GRPCInferenceService" in line:
                return
    finally:
        watchdog.cancel()
    raise SystemExit("the host did not start; its output stands above")


def main() -> None:
    command = [sys.executable, "-m", "pbhost", "serve"]
    command += [f"--model-repository={ROOT / 'model_repository'}", "--grpc-port=0"]
    command += ["--grpc-address=127.0.0.1", "--allow-metrics=false", "--allow-http=false"]
    print("$ pbhost serve --model-repository=model_repository")
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as host:
        port = ""
        for line in lines_until_started(host):
            print(line, end="")
            port = "".join(re.findall(r"Started GRPCInferenceService at \S+:(\d+)", line))
        assert host.stdout is not None
        rest = threading.Thread(target=host.stdout.read, daemon=True)
        rest.start()  # a full pipe would stop the host
        try:
            for client in CLIENTS:
                print(f"\n$ python examples/{client} --url localhost:{port}", flush=True)
                script = [sys.executable, str(ROOT / "examples" / client)]
                subprocess.run([*script, "--url", f"localhost:{port}"], check=True, timeout=60)
        finally:
            host.send_signal(signal.SIGINT)
            status = host.wait(timeout=60)
    print(f"\nthe host has stopped with exit status {status}")
    sys.exit(status)


if __name__ == "__main__":
    main()
