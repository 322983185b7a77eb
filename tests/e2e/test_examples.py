"""Every example of model_repository/ and examples/, run by the commands that their README gives."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from tests import readmes
from tests.clients import InferStream, infer_error, is_final, tensor
from tests.conftest import DEADLINE, ROOT, RunningHost, Serve
from tests.pythons import need_index

README = (ROOT / "model_repository" / "README.md").read_text()
CLIENT = r"`python (examples/[^`]+)` \|$"
ROWS = re.findall(rf"^\| `(\w+)` \| [^|]* \| {CLIENT}", README, re.MULTILINE)
PIPELINES = {
    name: (members.replace("`", "").split(), client)
    for name, members, client in re.findall(
        rf"^\| \[`(\w+)`\]\(\w+\) \| [^|]* \| ([`\w ]+) \| {CLIENT}", README, re.MULTILINE
    )
}

EXPECTED = {
    "add_sub": "= [[11. 22. 33. 44.]]",
    "identity_types": "STRING  object   [3] same: True",
    "auto_config": "6 words: to be or not to be",
    "multi_file": "[-40.   32.   97.9 212. ] in Fahrenheit",
    "image_preprocess": "disc.jpg (480, 640, 3) -> (3, 224, 224)",
    "bls_loop": "[ 32.  64.  96. 128.] after 5 steps",
    "fan_out": "from their mean: [-3. -1.  0.  4.]\nwords in the note: 4",
    "repeat": "response 2: 0\nresponse 3: 1\nthat was all",
    "generate": "Alice was considering in her own mind, as well as she could, for she had peeped",
    "sentence": "1 tokens: Oh dear!",
    "long_job": "  cancelled\nprimes below 2000000:\n  82025 after 52.4289 %\n"
    "  148933 after 100.0000 %\n  finished",
    "metered": 'reversed_characters_bucket{model="metered",version="1",le="10"} 2',
    "cached_model": "is 6857\ncomputed: 1, from the cache: 2",
    "warmed_up_model": "the table was made before the first request: True\n[0. 1. 0.]",
    "stateful_accumulator": "anna: 3\nbert: 150\nanna: 6\nbert: 175",
    "padded_batch": "[5, 7] -> [-1.  1.]\n[1, 1, 1, 5] -> [-1. -1. -1.  3.]",
    "data_pipeline": "caption: WHITE ON THE LEFT\nlevels: [0, 155, 255]\noffsets: [-120, 0, 3]\n"
    "first row of the image: [0.0, 0.0, 0.0, 0.0, 1.0, 1.0]\nbright: False",
    "digits": "digits: 31415926 drawn in (480, 1480), 8 found: 31415926\n"
    "digits: 8070 drawn in (480, 760), 4 found: 8070",
    "digits_bls": "digits_bls: 31415926 drawn in (480, 1480), 8 found: 31415926\n"
    "digits_bls: 8070 drawn in (480, 760), 4 found: 8070",
}


@pytest.fixture(scope="module")
def host(module_serve: Serve) -> RunningHost:
    cache = "--cache-config=local,size=1048576"
    return module_serve(ROOT / "model_repository", cache).wait_started()


def run(client: str, host: RunningHost) -> str:
    """The output of a client of the README."""
    command = client.replace("localhost:8001", host.url)
    if "localhost:8002" in command:
        address = host.wait_for(r"Started Metrics Service at (\S+:\d+)").group(1)
        command = command.replace("localhost:8002", address)
    return readmes.run(f"python {command}")


class ModelStream(InferStream):
    """A stream to any model."""

    def infer(self, model: str, inputs: list[grpcclient.InferInput], **options: Any) -> None:
        """Sends a request."""
        self._client.async_stream_infer(model, inputs, **options)


def test_every_model_has_a_row_and_an_expectation() -> None:
    models = {path.name for path in (ROOT / "model_repository").iterdir() if path.is_dir()}
    models.discard("__pycache__")
    members = {name for members, _ in PIPELINES.values() for name in members}
    shown = {*(name for name, _ in ROWS), *PIPELINES}
    assert shown | members == models
    assert shown == set(EXPECTED)


@pytest.mark.parametrize(("name", "client"), ROWS)
def test_the_readmes_command_works(host: RunningHost, name: str, client: str) -> None:
    assert EXPECTED[name] in run(client, host)


@pytest.mark.parametrize("name", PIPELINES)
def test_the_command_of_a_pipeline_works_in_every_readme_that_has_it(
    host: RunningHost, name: str
) -> None:
    client = PIPELINES[name][1]
    texts = [path.read_text() for path in (ROOT / "model_repository").glob("*/README.md")]
    assert any(f"\npython {client}\n" in text for text in texts)
    assert EXPECTED[name] in run(client, host)


def test_every_pair_of_digits_is_read(host: RunningHost) -> None:
    """And an image without any gives none, whichever way it is done."""
    for model in ("digits", "digits_bls"):
        client = f"examples/digits.py --url localhost:8001 --model {model} 0123456789 1 47"
        found = re.findall(r"found: (\d+)", run(client, host))
        assert found == ["0123456789", "1", "47"]
        with host.client() as own:
            image = tensor("IMAGE", np.zeros((20, 30), np.uint8))
            result = own.infer(model, [image])
            assert result.as_numpy("DIGITS").shape == (0,)
            assert result.as_numpy("BOXES").shape == (0, 4)


def test_a_cancelled_job_has_removed_its_files(host: RunningHost) -> None:
    run(dict(ROWS)["long_job"], host)
    host.wait_for(r"cancelled at \d+ of 100000000000, scratch files removed")


def test_repeat_refuses_delays_that_do_not_belong_to_numbers(host: RunningHost) -> None:
    inputs = [
        tensor("IN", np.array([1, 2], dtype=np.int32)),
        tensor("DELAY", np.array([0], dtype=np.uint32)),
        tensor("WAIT", np.array([0], dtype=np.uint32)),
    ]
    stream = ModelStream(host, headers={"triton_grpc_error": "true"})
    with stream:
        stream.infer("repeat", inputs)
        status, text = infer_error(stream.next)
    assert (status, text) == (
        "StatusCode.INVALID_ARGUMENT",
        "IN has 2 elements, but DELAY has 1",
    )


def test_generated_tokens_of_two_requests_interleave(host: RunningHost) -> None:
    """One instance answers both: the second does not wait for the end of the first."""
    prompt = tensor("PROMPT", np.array([b"Alice"], dtype=np.object_))
    tokens: dict[str, list[bytes]] = {"long": [], "short": []}
    stream = ModelStream(host)
    with stream:
        for name, count in (("long", 1_000_000), ("short", 30)):
            most = tensor("MAX_TOKENS", np.array([count], dtype=np.int32))
            inputs = [prompt, most]
            stream.infer("generate", inputs, request_id=name, enable_empty_final_response=True)
        ended = False
        while not ended or len(tokens["long"]) < 30:
            result = stream.next()
            name = result.get_response().id
            if is_final(result):
                assert name == "short"
                ended = True
            else:
                tokens[name].append(result.as_numpy("TOKEN")[0])
    assert tokens["short"] == tokens["long"][:30], "the same seed, the same text"
    assert len(tokens["short"]) == 30


@pytest.mark.test_all(reason="test_built_environments.py builds environments, too")
@pytest.mark.network
@pytest.mark.timeout(700)  # pip downloads numpy
def test_a_model_with_requirements_has_them(serve: Serve, tmp_path: Path) -> None:
    need_index(tmp_path / "downloads")
    example = ROOT / "examples" / "with_requirements"
    host = serve(example / "models", f"--environment-cache-dir={tmp_path / 'cache'}")
    host.wait_for("Started GRPCInferenceService", seconds=600)
    command, _, output = (
        (example / "README.md").read_text().partition("$ python client.py")[2].partition("\n")
    )
    assert run(f"{example}/client.py{command}", host.wait_started()) == output.partition("```")[0]


def test_the_demo_shows_its_queries_and_stops_cleanly() -> None:
    done = subprocess.run(
        [sys.executable, "examples/demo.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=4 * DEADLINE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("add_sub", "bls_loop", "generate"):
        assert EXPECTED[name] in done.stdout
    assert "the host has stopped with exit status 0" in done.stdout
