"""Token counts of the OpenAI routes by the `tokenizer.json` of a model, on a real host."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from host.frontends.openai.model_files import TokenCounter
from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve
from tests.openai_models import (
    LETTERS,
    LETTERS_CONFIG,
    WHOLE,
    WHOLE_CONFIG,
    chat,
    complete,
    send,
)

needs_tokenizers = pytest.mark.skipif(
    importlib.util.find_spec("tokenizers") is None, reason="needs the package tokenizers"
)
START = {"SpecialToken": {"id": "<s>", "type_id": 0}}
TEXT = {"Sequence": {"id": "A", "type_id": 0}}
WORDS = json.dumps(
    {
        "version": "1.0",
        "truncation": {
            "direction": "Right",
            "max_length": 2,
            "strategy": "LongestFirst",
            "stride": 0,
        },
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [START, TEXT],
            "pair": [START, TEXT, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "model": {"type": "WordLevel", "vocab": {"?": 0, "<s>": 1}, "unk_token": "?"},
    }
)
"""Each word is a token; `<s>` stands before each prompt."""

PLAIN = 'parameters { key: "OPENAI_CHAT_TEMPLATE" value { string_value: "plain" } }\n'
CHOSEN = 'parameters { key: "OPENAI_TOKENIZER" value { string_value: "%s" } }\n'


@pytest.fixture(scope="module")
def host(module_serve: Serve, module_repository: RepositoryBuilder) -> Iterator[RunningHost]:
    config = WHOLE_CONFIG + PLAIN
    module_repository.add("whole", WHOLE, config, files={"tokenizer.json": WORDS})
    module_repository.add("off", WHOLE, config + CHOSEN % "off", files={"tokenizer.json": WORDS})
    chosen = config + CHOSEN % "words.json"
    if importlib.util.find_spec("tokenizers") is not None:  # without it, this model cannot load
        module_repository.add("chosen", WHOLE, chosen, files={"words.json": WORDS})
    module_repository.add("letters", LETTERS, LETTERS_CONFIG, files={"tokenizer.json": WORDS})
    module_repository.add("damaged", WHOLE, config, files={"1/tokenizer.json": "{}"})
    yield module_serve(module_repository).wait_started()


def usage(prompt: int, completion: int) -> dict[str, int]:
    total = prompt + completion
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total}


@needs_tokenizers
def test_the_tokenizer_counts_what_the_model_does_not_count(host: RunningHost) -> None:
    assert complete(host, "a b c", model="whole").json["usage"] == usage(4, 3)
    assert complete(host, "a b c", model="chosen").json["usage"] == usage(4, 3)
    # A rendered prompt has its special tokens: "user: a b", "assistant:".
    assert chat(host, "a b", model="whole").json["usage"] == usage(4, 4)
    body = {"model": "whole", "input": "a b"}
    answer = send(host, "POST", "/v1/responses", body).json
    assert (answer["usage"]["input_tokens"], answer["usage"]["output_tokens"]) == (4, 4)


@needs_tokenizers
def test_a_prompt_of_several_choices_counts_once(host: RunningHost) -> None:
    answer = complete(host, ["a b", "c"], model="whole", n=2).json
    assert answer["usage"] == usage(3 + 2, 2 * 3)


@needs_tokenizers
def test_a_stream_ends_with_the_counted_usage(host: RunningHost) -> None:
    wanted = {"stream": True, "stream_options": {"include_usage": True}}
    events = complete(host, "a b", model="whole", **wanted).events
    assert events[-1] == "[DONE]" and events[-2]["usage"] == usage(3, 2)
    assert "usage" not in complete(host, "a b", model="whole", stream=True).events[-2]


@needs_tokenizers
def test_a_text_after_a_stop_sequence_is_not_counted(host: RunningHost) -> None:
    answer = complete(host, "a b STOP c", model="whole", stop="STOP").json
    assert answer["usage"] == usage(5, 2)


@needs_tokenizers
def test_a_long_text_is_counted_in_a_thread_and_one_of_a_million_characters_is_not(
    host: RunningHost,
) -> None:
    assert complete(host, "a " * 50_000, model="whole").json["usage"] == usage(50_001, 50_000)
    reply = complete(host, "a " * (1 << 20), model="whole")
    assert (reply.status, reply.json["usage"]) == (200, None)


def test_the_counts_of_the_model_come_first(host: RunningHost) -> None:
    assert complete(host, "a b|c d", model="letters").json["usage"] == usage(2, 2)


def test_a_tokenizer_can_be_turned_off(host: RunningHost) -> None:
    assert complete(host, "a b", model="off").json["usage"] is None


def test_a_damaged_tokenizer_that_no_parameter_names_is_an_error_in_the_log(
    host: RunningHost,
) -> None:
    host.wait_for("OPENAI_TOKENIZER of model 'damaged': 'tokenizer.json' ")
    assert complete(host, "a", model="damaged").json["usage"] is None


WRONG: dict[str, tuple[str, Any]] = {
    "absent.json": ("cannot read 'absent.json': No such file or directory", {}),
    "../words.json": ("'../words.json' lies outside of the model's folder", {}),
    "damaged.json": ("'damaged.json' ", {"damaged.json": "no tokenizer"}),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_tokenizer_that_a_parameter_names_fails_the_load_and_the_check(
    serve: Serve, repository: RepositoryBuilder, name: str
) -> None:
    text, files = WRONG[name]
    repository.add("whole", WHOLE, WHOLE_CONFIG + CHOSEN % name, files=files)
    expected = f"OPENAI_TOKENIZER of model 'whole': {text}"
    host = serve(repository, "--exit-on-error=false").wait_started()
    host.wait_for(f"failed to load 'whole'.*{expected}")
    command = [sys.executable, "-m", "pbhost", "check", str(repository.path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 1 and expected in done.stdout


def test_a_tokenizer_without_its_package_names_the_extra(
    serve: Serve, repository: RepositoryBuilder
) -> None:
    repository.add("whole", WHOLE, WHOLE_CONFIG, files={"tokenizer.json": WORDS})
    hide = "import sys; sys.modules['tokenizers'] = None; from host.__main__ import main; main()"
    command = [sys.executable, "-c", hide, "check", str(repository.path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 1
    assert "which is not installed: pip install 'pbhost[tokenizers]'" in done.stdout


@needs_tokenizers
def test_a_counter_ignores_the_truncation_of_its_file() -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(WORDS)
    tokenizer.no_truncation()
    assert TokenCounter(tokenizer).count("a b c d", special_tokens=False) == 4
