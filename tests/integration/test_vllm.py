"""The example of vLLM's engine, in front of the real package: make test-vllm."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import psutil
import pytest

from tests.conftest import DEADLINE, ROOT, RunningHost, Serve, wait_until
from tests.readmes import run

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is large: make test-vllm", allow_module_level=True)
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]

import openai  # noqa: E402

EXAMPLE = ROOT / "examples" / "vllm"
STARTS = 600.0  # seconds: three processes import PyTorch one after the other
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
}
QUESTION = [{"role": "user", "content": "Who are you?"}]


@pytest.fixture(scope="module")
def commands() -> list[str]:
    """The commands of the README, and at the end what the last one prints."""
    text = (EXAMPLE / "README.md").read_text()
    found = re.search(r"^\$ (python .+)\n\$ (pbhost serve .+)\n\$ (python .+)\n([^`]+)", text, re.M)
    assert found is not None
    return list(found.groups())


@pytest.fixture(scope="module")
def host(
    module_serve: Serve, commands: list[str], tmp_path_factory: pytest.TempPathFactory
) -> RunningHost:
    folder = tmp_path_factory.mktemp("vllm")
    build, start, _, _ = commands
    subprocess.run(
        [sys.executable, *build.replace("/tmp/vllm", str(folder)).split()[1:]],
        cwd=ROOT, env={**psutil.Process().environ(), **ENVIRONMENT}, timeout=STARTS, check=True,
    )  # fmt: skip
    file = folder / "models" / "tiny_llama" / "1" / "model.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "enable_log_requests": True}))
    backends = start.split("--backend-directory=")[1]
    host = module_serve(
        folder / "models", f"--backend-directory={ROOT / backends}", env=ENVIRONMENT
    )
    host.wait_for("Started HTTPService", STARTS)
    return host


@pytest.fixture
def client(host: RunningHost) -> Iterator[Any]:
    address = f"http://{host.http_url}/v1"
    with openai.OpenAI(base_url=address, api_key="any", timeout=DEADLINE, max_retries=0) as client:
        yield client


def write(client: Any, prompt: str = "Once", model: str = "tiny_llama", **fields: Any) -> Any:
    return client.completions.create(model=model, prompt=prompt, **fields)


def chat(client: Any, **fields: Any) -> Any:
    return client.chat.completions.create(model="tiny_llama", messages=QUESTION, **fields)


def test_the_readmes_command_works(host: RunningHost, commands: list[str]) -> None:
    assert run(commands[2].replace("localhost:8000", host.http_url)) == commands[3]


def test_models_speak_what_their_tensors_say(host: RunningHost, client: Any) -> None:
    assert "model 'tiny_llama' speaks chat, completions, embeddings (/v1)" in host.output
    listed = {model.id for model in client.models.list()}
    assert listed == {"tiny_llama", "tiny_llama-loud", "tiny_embed"}


def test_chats_are_equal_whole_and_streamed(client: Any) -> None:
    asked = {"max_tokens": 30, "temperature": 0}
    whole = chat(client, **asked)
    *chunks, counts = chat(client, **asked, stream=True, stream_options={"include_usage": True})
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content and len(text) == 30
    assert whole.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "length"
    assert whole.usage == counts.usage
    rendered = "user: Who are you?\nassistant:"
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(rendered), 30)


def test_choices_of_a_completion_have_seeds_of_their_own(client: Any) -> None:
    made = write(client, max_tokens=20, seed=4, n=2)
    first, second = (choice.text for choice in made.choices)
    assert first != second and len(first) == len(second) == 20
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (4, 40)
    assert write(client, max_tokens=20, seed=4).choices[0].text == first
    assert write(client, max_tokens=20, seed=4, echo=True).choices[0].text == f"Once{first}"


def test_the_engine_stops_at_stop_sequences(client: Any) -> None:
    text = write(client, max_tokens=20, seed=4).choices[0].text
    stop = text[8:11]
    stopped = write(client, max_tokens=20, seed=4, stop=stop).choices[0]
    assert (stopped.text, stopped.finish_reason) == (text[: text.index(stop)], "stop")
    assert stopped.text != text
    chunks = list(write(client, max_tokens=20, seed=4, stop=stop, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == stopped.text


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_belong_to_the_text(client: Any, stream: bool) -> None:
    asked = {"max_tokens": 8, "seed": 4, "logprobs": True, "top_logprobs": 3, "stream": stream}
    made = chat(client, **asked)
    choices = [chunk.choices[0] for chunk in made] if stream else [made.choices[0]]
    tokens = [token for one in choices if one.logprobs for token in one.logprobs.content]
    parts = [one.delta.content or "" if stream else one.message.content for one in choices]
    assert "".join(token.token for token in tokens) == "".join(parts)
    assert len(tokens) == 8 and all(len(token.top_logprobs) >= 2 for token in tokens)
    assert all(token.logprob <= 0 for token in tokens)


def test_a_completion_has_log_probabilities(client: Any) -> None:
    choice = write(client, max_tokens=5, seed=4, logprobs=2).choices[0]
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.text_offset == [0, 1, 2, 3, 4]


def test_answers_follow_a_schema(client: Any) -> None:
    schema = {"enum": ["Oslo", "Rome"]}
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    made = chat(client, max_tokens=60, seed=4, response_format=form).choices[0]
    assert json.loads(made.message.content) in ("Oslo", "Rome")


def test_adapters_write_other_texts(client: Any) -> None:
    plain, loud, by_field = (
        write(client, model=model, max_tokens=30, temperature=0, extra_body=more).choices[0].text
        for model, more in [
            ("tiny_llama", None),
            ("tiny_llama-loud", None),
            ("tiny_llama", {"lora_name": "loud"}),
        ]
    )
    assert loud == by_field != plain


def test_each_text_gets_its_embedding(client: Any) -> None:
    made = client.embeddings.create(model="tiny_embed", input=["a cat", "a dog"])
    first, second = (entry.embedding for entry in made.data)
    assert len(first) == len(second) == 128 and first != second
    assert sum(number**2 for number in first) == pytest.approx(1, abs=0.01)
    assert made.usage.prompt_tokens == 10


def test_eight_streams_are_written_at_the_same_time(client: Any) -> None:
    all_started = threading.Barrier(8, timeout=DEADLINE)

    def read(number: int) -> int:
        options = {"include_usage": True}
        with closing(
            write(client, str(number), max_tokens=200, stream=True, stream_options=options)
        ) as stream:
            next(stream)
            all_started.wait()
            *_, counts = stream
        return int(counts.usage.completion_tokens)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(read, range(8))) == [200] * 8


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts_its_request_in_the_engine(
    host: RunningHost, client: Any, stream: bool
) -> None:
    aborts = re.compile(r"Request \S+ aborted")
    before = len(aborts.findall(host.output))
    asked: dict[str, Any] = {"max_tokens": 500, "stream": stream}
    if stream:
        with closing(write(client, **asked)) as chunks:
            next(chunks)
    else:
        with pytest.raises(openai.APITimeoutError):
            write(client, **asked, timeout=0.3)
    wait_until(lambda: len(aborts.findall(host.output)) > before, "the engine to abort")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"prompt": "x" * 600}, "maximum"),
        ({"prompt": ""}, "'text_input' is missing or empty"),
        ({"extra_body": {"nonsense": 1}}, "nonsense"),
        ({"extra_body": {"top_k": -5}}, "top_k"),
        ({"extra_body": {"lora_name": "quiet"}}, "there is no LoRA adapter 'quiet'"),
        ({"model": "tiny_embed"}, ""),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_wrong_requests_are_refused(
    client: Any, fields: dict[str, Any], text: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError, match=text):
        write(client, **{"max_tokens": 5, **fields}, stream=stream)


def test_generate_requests_of_tritons_clients_are_served(host: RunningHost) -> None:
    body = {
        "text_input": "Once",
        "sampling_parameters": json.dumps({"max_tokens": 5, "temperature": 0}),
        "return_finish_reason": True,
        "return_cumulative_logprob": True,
        "return_num_output_tokens": True,
    }
    url = f"http://{host.http_url}/v2/models/tiny_llama/generate"
    with urllib.request.urlopen(url, json.dumps(body).encode(), DEADLINE) as reply:
        answer = json.load(reply)
    assert answer["text_output"].startswith("Once") and len(answer["text_output"]) == 9
    assert (answer["finish_reason"], answer["num_output_tokens"]) == ("length", 5)
    assert "num_input_tokens" not in answer
    with urllib.request.urlopen(
        f"{url}_stream", json.dumps({**body, "stream": True}).encode(), DEADLINE
    ) as reply:
        events = [json.loads(line[6:]) for line in reply if line.startswith(b"data: ")]
    assert "".join(event["text_output"] for event in events) == answer["text_output"][4:]
    assert [event["finish_reason"] for event in events][-1] == "length"


def test_a_dead_engine_is_told(host: RunningHost, client: Any) -> None:
    (stub,) = host.stubs("tiny_llama_0_0")
    for process in stub.children(recursive=True):
        if "EngineCore" in process.name() or "EngineCore" in " ".join(process.cmdline()):
            process.kill()
    ready = f"http://{host.http_url}/v2/models/tiny_llama/ready"

    def is_ready() -> bool:
        try:
            with urllib.request.urlopen(ready, timeout=DEADLINE):
                return True
        except urllib.error.HTTPError:
            return False

    wait_until(lambda: not is_ready(), "the model to be not ready")
    with pytest.raises(openai.InternalServerError, match="the engine has died"):
        write(client, max_tokens=5)
