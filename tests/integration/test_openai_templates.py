"""Chat templates in the folders of models, on a real host."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from host.frontends.openai.openai_errors import OpenAIError
from host.frontends.openai.template import compile_template, render_built_in, run_with_time_limit
from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve
from tests.openai_models import WHOLE, WHOLE_CONFIG, chat, complete, send

TEMPLATE = """
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == "function" %}{{ raise_exception("no functions, please") }}{% endif %}
{%- generation %}[{{ message.role }}] {{ message.content }};{% endgeneration %}
{%- endfor %}
{%- if add_generation_prompt %} [answer]{% endif %}
{%- if shout is defined %} {{ {"a": "<é>"} | tojson }}{% endif %}
"""
TOKENIZER = json.dumps({"bos_token": {"content": "<s>"}, "chat_template": "{{ messages[0].role }}"})
CHOOSE = """
parameters { key: "OPENAI" value { string_value: "chat" } }
parameters { key: "OPENAI_CHAT_TEMPLATE" value { string_value: "%s" } }
"""


def text(host: RunningHost, content: object, **fields: object) -> str:
    reply = chat(host, content, **fields)
    assert reply.status == 200, reply.body
    return str(reply.json["choices"][0]["message"]["content"])


def test_templates_of_the_folder_render_chats(
    serve: Serve, repository: RepositoryBuilder, tmp_path: Path
) -> None:
    both = {"chat_template.jinja": TEMPLATE, "tokenizer_config.json": TOKENIZER}
    repository.add("whole", WHOLE, WHOLE_CONFIG, files=both)
    repository.add("tokenizer", WHOLE, WHOLE_CONFIG, files={"1/tokenizer_config.json": TOKENIZER})
    chosen = WHOLE_CONFIG + CHOOSE % "my.jinja"
    repository.add("chosen", WHOLE, chosen, files={**both, "my.jinja": "mine"})
    broken = {"chat_template.jinja": "a\n{% for %}"}
    repository.add("broken", WHOLE, WHOLE_CONFIG, files=broken)
    host = serve(repository).wait_started()

    assert text(host, "hi", model="whole") == "<S>[USER] HI; [ANSWER]"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert text(host, parts, model="whole") == "<S>[USER] A\nB; [ANSWER]"
    shouted = text(host, "x", model="whole", chat_template_kwargs={"shout": True})
    assert json.loads(shouted.split(" ", 3)[3].lower().replace("É".lower(), "e")) == {"a": "<e>"}
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    unfinished = {"model": "whole", "messages": turns, "continue_final_message": True}
    reply = send(host, "POST", "/v1/chat/completions", unfinished)
    assert reply.json["choices"][0]["message"]["content"] == "<S>[USER] A;[ASSISTANT] B;"
    assert text(host, "hi", model="tokenizer") == "USER"
    assert text(host, "hi", model="chosen") == "MINE"
    messages = [{"role": "developer", "content": "d"}]
    body = {"model": "whole", "messages": messages}
    answer = send(host, "POST", "/v1/chat/completions", body).json
    assert answer["choices"][0]["message"]["content"] == "<S>[SYSTEM] D; [ANSWER]"

    body["messages"] = [{"role": "function", "content": "f"}]
    refused = send(host, "POST", "/v1/chat/completions", body)
    assert (refused.status, refused.error["message"]) == (400, "no functions, please")
    reply = chat(host, "a", model="broken")
    assert reply.status == 400
    assert reply.error["message"].startswith("the chat template of model 'broken': line 2: ")
    assert complete(host, "a", model="broken").status == 200


def test_a_template_that_runs_too_long_is_ended() -> None:
    forever = (
        "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}"
        "{% endfor %}{% endfor %}{% endfor %}"
    )
    render = compile_template(forever, "m", 1000)
    with pytest.raises(OpenAIError, match=r"template of model 'm' ran for more than 0\.2 s"):
        asyncio.run(run_with_time_limit(lambda: render({}), 0.2, "m"))


DOUBLING = (
    "{%% macro twice(x) %%}{{ x }}{{ x }}{%% endmacro %%}{%% set n = namespace(x=%s) %%}"
    "{%% for i in range(60) %%}{%% set n.x = %s %%}{%% endfor %%}"
)


@pytest.mark.parametrize(
    ("template", "status"),
    [
        ("{% for a in range(9999) %}{{ a }}{% endfor %}", 413),
        ("{{ 'a' * 999999999 }}", 500),
        ("{{ 'a' ~ 'b' * 999999999 }}", 500),
        ("{{ 9 ** 999999999 }}", 500),
        ("{{ 9 ** (9 ** 9) }}", 500),
        ("{{ 9.5 ** 999999999 }}", 500),
        ("{{ '%1000000000d' % 5 }}", 500),
        ("{{ '%1000000000d'|format(5) }}", 500),
        ("{{ '%*d' % (1000000000, 5) }}", 500),
        ("{{ '{:>1000000000}'.format(5) }}", 500),
        ("{{ '{:>{}}'.format(5, 1000000000) }}", 500),
        ("{{ 'a'|center(3000000000) }}", 500),
        ("{{ 'a'.ljust(3000000000) }}", 500),
        ("{{ ('\n' * 99999)|indent(3000000000) }}", 500),
        ("{{ ('a' * 99999).replace('a', 'b' * 99999) }}", 500),
        ("{{ ('a' * 99999)|replace('a', 'b' * 99999) }}", 500),
        ("{{ ('a' * 99999).join(['b'] * 99999) }}", 500),
        ("{{ (['b'] * 99999)|join('a' * 99999) }}", 500),
        ("{{ [1]|batch(3000000000, 0)|list }}", 500),
        ("{{ lipsum(n=3000000000) }}", 500),
        (DOUBLING % ("'a'", "n.x ~ n.x"), 500),
        (DOUBLING % ("'a'", "n.x + n.x"), 500),
        (DOUBLING % ("[1]", "n.x + n.x"), 500),
        (DOUBLING % ("'a'", "twice(n.x)"), 500),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", 500),
        ("{{ ''.__class__.__mro__ }}", 500),
        ("{{ messages.append(1) }}", 500),
        ("{{ nothing.at.all }}", 500),
    ],
)
def test_a_template_cannot_leave_its_sandbox_or_take_much_memory(
    template: str, status: int
) -> None:
    with pytest.raises(OpenAIError) as caught:
        compile_template(template, "m", 1000)({"messages": []})
    assert caught.value.status == status


COUNTDOWN = (
    "{% macro f(n) %}{{ n }}{% if n %} {{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(depth) }}"
)


def test_macros_that_call_themselves_are_limited_in_their_depth() -> None:
    render = compile_template(COUNTDOWN, "m", 1000)
    assert render({"depth": 63}) == " ".join(map(str, range(63, -1, -1)))
    with pytest.raises(OpenAIError, match="more than 64 calls are nested"):
        render({"depth": 64})
    assert render({"depth": 63}).endswith(" 0")


NESTED_LIST = "{% for part in parts recursive %}.{{ loop(part) }}{% endfor %}"


def test_recursive_loops_are_limited_in_their_depth() -> None:
    def nest(depth: int) -> list[Any]:
        return [nest(depth - 1)] if depth else []

    render = compile_template(NESTED_LIST, "m", 1000)
    assert render({"parts": nest(64)}) == "." * 64
    with pytest.raises(OpenAIError, match="more than 64 calls are nested"):
        render({"parts": nest(65)})


def test_a_template_that_calls_itself_for_ever_does_not_take_all_frames_of_python() -> None:
    deepest = 0

    def measure() -> str:
        nonlocal deepest
        frame, depth = sys._getframe(), 0
        while frame.f_back is not None:
            frame, depth = frame.f_back, depth + 1
        deepest = max(deepest, depth)
        return ""

    template = "{% macro f() %}{{ measure() }}{{ f() }}{% endmacro %}{{ f() }}"
    render = compile_template(template, "m", 1000)
    with pytest.raises(OpenAIError):
        render({"measure": measure})
    assert 0 < deepest < sys.getrecursionlimit() // 2


def test_built_in_templates_render_the_messages() -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert render_built_in("last", messages) == "u"
    assert render_built_in("plain", messages) == "system: s\nuser: u\nassistant:"
    assert render_built_in("chatml", messages) == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"
    )


FAULTS = {
    "a\n{% for %}": "'chat_template.jinja', line 2: ",
    "a\n\n{{ nothing.at.all }}": "failed: line 3: UndefinedError: 'nothing' is undefined",
}


@pytest.mark.parametrize("template", FAULTS)
def test_a_chosen_template_that_cannot_be_rendered_fails_the_load_and_the_check(
    serve: Serve, repository: RepositoryBuilder, template: str
) -> None:
    config = WHOLE_CONFIG + CHOOSE % "chat_template.jinja"
    repository.add("whole", WHOLE, config, files={"chat_template.jinja": template})
    host = serve(repository, "--exit-on-error=false").wait_started()
    text = "OPENAI_CHAT_TEMPLATE of model 'whole': 'chat_template.jinja'"
    line = host.wait_for("failed to load 'whole'.*OPENAI_CHAT_TEMPLATE of model 'whole'")
    assert line is not None
    assert text in host.output and FAULTS[template] in host.output
    command = [sys.executable, "-m", "pbhost", "check", str(repository.path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 1 and text in done.stdout and FAULTS[template] in done.stdout


def test_a_found_template_that_cannot_be_rendered_is_an_error_in_the_log(
    serve: Serve, repository: RepositoryBuilder
) -> None:
    config = WHOLE_CONFIG + CHOOSE.splitlines()[1]
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}x"
    repository.add("refusing", WHOLE, config, files={"chat_template.jinja": refusing})
    repository.add("whole", WHOLE, config, files={"chat_template.jinja": "{{ nothing.at.all }}"})
    host = serve(repository).wait_started()
    host.wait_for("OPENAI_CHAT_TEMPLATE of model 'whole': .*line 1: UndefinedError")
    assert "OPENAI_CHAT_TEMPLATE of model 'refusing'" not in host.output
    reply = chat(host, "a", model="whole")
    assert reply.status == 500 and "line 1: UndefinedError" in reply.error["message"]
    assert text(host, "a", model="refusing") == "X"


ENDLESS = (
    "{% if messages[0].content == 'loop' %}{% for a in range(9999) %}{% for b in range(9999) %}"
    "{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}{% endif %}x"
)


def test_chat_is_withdrawn_after_three_renderings_that_ran_too_long(
    serve: Serve, repository: RepositoryBuilder
) -> None:
    config = WHOLE_CONFIG + CHOOSE % "chat_template.jinja"
    repository.add("whole", WHOLE, config, files={"chat_template.jinja": ENDLESS})
    host = serve(repository, "--model-control-mode=explicit", "--load-model=whole")
    host.wait_started()
    assert text(host, "a", model="whole") == "X"
    many = [{"role": "user", "content": text} for text in ("loop", "x" * 70_000)]
    body = {"model": "whole", "messages": many}
    with ThreadPoolExecutor(3) as pool:
        replies = list(
            pool.map(lambda _: send(host, "POST", "/v1/chat/completions", body), range(3))
        )
        assert [reply.status for reply in replies] == [500] * 3
        assert text(host, "a", model="whole") == "X"  # a client cannot take chat from others
        replies = list(pool.map(lambda _: chat(host, "loop", model="whole"), range(3)))
    assert [reply.status for reply in replies] == [500] * 3
    assert "ran for more than 5 s" in replies[0].error["message"]
    refused = chat(host, "a", model="whole")
    assert (refused.status, refused.error["code"]) == (400, "unsupported_route")
    assert "ran for more than 5 s 3 times" in refused.error["message"]
    host.wait_for("model 'whole' does not do chat: its chat template ran for more than 5 s 3 times")
    assert send(host, "GET", "/v1/models").json["data"] == []
    assert send(host, "POST", "/v1/models/whole/unload").status == 200
    assert send(host, "POST", "/v1/models/whole/load").status == 200
    assert text(host, "a", model="whole") == "X"
