"""The checks of `OPENAI` parameters at load, and by `pbhost check`."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.conftest import DEADLINE, RepositoryBuilder, Serve
from tests.openai_models import LETTERS, LETTERS_CONFIG, WHOLE, WHOLE_CONFIG, complete, send

NAMES = """
parameters { key: "OPENAI_NAMES" value { string_value: "%s" } }
"""


def parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'


COMPLETING = (
    WHOLE
    + """
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "text_input", "data_type": "TYPE_STRING", "dims": [1]})
        config.add_output({"name": "text_output", "data_type": "TYPE_STRING", "dims": [1]})
        config.set_max_batch_size(0)
        return config
"""
)
WRONG = {
    "chats": (WHOLE, WHOLE_CONFIG + parameter("OPENAI", "chats")),
    "completed": (COMPLETING, parameter("OPENAI_INPUTS", "text_inpt=prompt")),
    "default": (WHOLE, WHOLE_CONFIG + parameter("OPENAI_DEFAULTS", "[1]")),
    "outside": (
        WHOLE,
        WHOLE_CONFIG + parameter("OPENAI_CHAT_TEMPLATE", "../whole/chat_template.jinja"),
    ),
    "absent": (WHOLE, WHOLE_CONFIG + parameter("OPENAI_CHAT_TEMPLATE", "absent.jinja")),
    "adapters": (WHOLE, WHOLE_CONFIG + parameter("OPENAI_LORA_SEPARATOR", "-")),
    "named": (WHOLE, WHOLE_CONFIG + parameter("OPENAI_NAMES", "letters")),
}
TEXTS = {
    "chats": "OPENAI of model 'chats' must list chat, completions, embeddings, transcriptions,"
    " images, speech, or be off; got 'chats', did you mean 'chat'?",
    "completed": "OPENAI_INPUTS of model 'completed' names input 'text_inpt', which the model does"
    " not have; did you mean 'text_input'?",
    "default": "OPENAI_DEFAULTS of model 'default' is no JSON object",
    "outside": "OPENAI_CHAT_TEMPLATE of model 'outside': '../whole/chat_template.jinja' lies"
    " outside of the model's folder",
    "absent": "OPENAI_CHAT_TEMPLATE of model 'absent': cannot read 'absent.jinja': No such file or"
    " directory",
    "adapters": "OPENAI_LORA_SEPARATOR of model 'adapters': cannot read 'multi_lora.json': No such"
    " file or directory",
    "named": "OPENAI_NAMES of model 'named': 'letters' is a model here",
}


def test_wrong_parameters_fail_the_load(serve: Serve, repository: RepositoryBuilder) -> None:
    repository.add("letters", LETTERS, LETTERS_CONFIG)
    for name, (model, config) in WRONG.items():
        repository.add(name, model, config)
    host = serve(repository, "--exit-on-error=false").wait_started()
    for name, text in TEXTS.items():
        host.wait_for(f"failed to load '{name}'.*{re.escape(text)}")
        assert complete(host, "a", model=name).error["code"] == "model_not_found"
    assert complete(host, "a|b").json["choices"][0]["text"] == "ab"


def test_what_a_model_speaks_is_logged_once(serve: Serve, repository: RepositoryBuilder) -> None:
    repository.add("letters", LETTERS, LETTERS_CONFIG)
    host = serve(repository).wait_started()
    assert complete(host, "a").status == 200
    assert host.output.count("model 'letters' speaks chat, completions (/v1)") == 1


def test_a_name_that_another_model_has_fails_the_load(
    serve: Serve, repository: RepositoryBuilder
) -> None:
    repository.add("letters", LETTERS, LETTERS_CONFIG)
    repository.add("other", WHOLE, WHOLE_CONFIG + NAMES % "acme/letters")
    host = serve(repository, "--model-control-mode=explicit", "--load-model=letters")
    host.wait_started()
    load, unload = ("/v2/repository/models/%s/" + verb for verb in ("load", "unload"))
    refused = send(host, "POST", load % "other", {})
    assert refused.status == 400
    assert "OPENAI_NAMES of model 'other': 'acme/letters' already names model 'letters'" in str(
        refused.json
    )
    assert send(host, "POST", unload % "letters", {}).status == 200
    assert send(host, "POST", load % "other", {}).status == 200
    assert complete(host, "a", model="acme/letters").json["choices"][0]["text"] == "A"


def test_pbhost_check_reports_wrong_parameters(repository: RepositoryBuilder) -> None:
    for name in ("chats", "default", "absent"):
        repository.add(name, *WRONG[name])
    repository.add("tensors", WHOLE, WHOLE_CONFIG + parameter("OPENAI_INPUTS", "text=prompt"))
    command = [sys.executable, "-m", "pbhost", "check", str(repository.path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 1
    for name in ("chats", "default", "absent"):
        assert TEXTS[name] in done.stdout
    assert "config.pbtxt:6:" in done.stdout
    missing = "OPENAI_INPUTS of model 'tensors' names input 'text', which the model does not have"
    assert missing in done.stdout


@pytest.mark.parametrize("value", ["off", "completions"])
def test_the_parameter_decides_what_a_model_speaks(
    serve: Serve, repository: RepositoryBuilder, value: str
) -> None:
    repository.add("whole", WHOLE, WHOLE_CONFIG + parameter("OPENAI", value))
    host = serve(repository).wait_started()
    assert complete(host, "a", model="whole").status == (400 if value == "off" else 200)
