"""The page at /docs in a browser, and the OpenAPI document, which schemathesis uses."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import openapi_spec_validator
import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By

from tests.browser import WebPage, complaints, open_browser
from tests.clients import kill_stub
from tests.conftest import DEADLINE, ROOT, RepositoryBuilder, RunningHost, Serve, wait_until
from tests.openai_models import LETTERS, LETTERS_CONFIG

EXAMPLES = ROOT / "model_repository"
WORDS = """
import itertools
import threading

import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            text = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()[0].decode()
            endless = itertools.repeat("ever")
            for word in endless if text == "forever" else text.split():
                if request.is_cancelled():
                    break
                if text == "forever":
                    threading.Event().wait(0.01)
                array = np.array([word.encode()], dtype=np.object_)
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("WORD", array)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
WORDS_CONFIG = """
backend: "python"
input [ { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "WORD" data_type: TYPE_STRING dims: [ 1 ] } ]
model_transaction_policy { decoupled: true }
"""
HALF = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse(request.inputs()) for request in requests]
"""
HALF_CONFIG = """
backend: "python"
version_policy { all { } }
input [
    { name: "X" data_type: TYPE_FP16 dims: [ -1 ] },
    { name: "B" data_type: TYPE_BF16 dims: [ -1 ] optional: true }
]
output [
    { name: "X" data_type: TYPE_FP16 dims: [ -1 ] },
    { name: "B" data_type: TYPE_BF16 dims: [ -1 ] }
]
"""
TWICE_CONFIG = """
platform: "ensemble"
max_batch_size: 8
input [ { name: "X" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 4 ] } ]
ensemble_scheduling { step [ {
    model_name: "add_sub" model_version: -1
    input_map [ { key: "INPUT0" value: "X" }, { key: "INPUT1" value: "X" } ]
    output_map [ { key: "SUM" value: "Y" } ]
} ] }
"""
BROKEN = """
raise ValueError("no <img src=x onerror=alert(1)> today")
"""
MARKUP = "no <img src=x onerror=alert(1)> today"

UNREADABLE = re.compile(
    r"attempt to (access|get)|failed to parse the request JSON|failed to get request params"
    r"|Unable to (parse|set) '|Unable to parse JSON bytes array|Expected JSON object for keyword"
    r"|Converting keyword|shape does not match true shape|unexpected error on creating Triton param"
)
"""Malformed JSON, which gets status 500 (docs/reference/protocol.md, "JSON over HTTP",
docs/reference/http.md, "Inference request").
"""
REFUSED = re.compile(
    r"string correlation ID cannot be longer|failed to load '.*', failed to poll from model repo"
    r"|Unable to open shared memory region|Invalid shared memory region"
    r"|invalid argument for --log_format|explicit model load / unload is not allowed"
    r"|location can not be updated through network|this server does not (record|send)"
)
"""Paths that respond with a status of 500 or more, even to a well-formed request."""


@pytest.fixture(scope="module")
def host(module_repository: RepositoryBuilder, module_serve: Serve) -> RunningHost:
    for name in ("add_sub", "identity_types", "stateful_accumulator"):
        shutil.copytree(EXAMPLES / name, module_repository.path / name)
    module_repository.add("words", WORDS, WORDS_CONFIG)
    module_repository.add("half", HALF, HALF_CONFIG)
    module_repository.add("half", HALF, version=2)
    module_repository.add("twice", config=TWICE_CONFIG)
    (module_repository.path / "twice" / "1").mkdir(exist_ok=True)
    module_repository.add("broken", BROKEN)
    module_repository.add("unreadable", config="max_batch_size: many")
    flags = ("--model-control-mode=explicit", "--load-model=*", "--exit-on-error=false")
    return module_serve(module_repository, *flags, "--allow-client-shm=true").wait_started()


def send_request(
    host: RunningHost, method: str, path: str, body: object = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of one request."""
    with closing(http.client.HTTPConnection(host.http_url, timeout=DEADLINE)) as connection:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        text = b"" if body is None else json.dumps(body).encode()
        connection.request(method, path, text, names)
        response = connection.getresponse()
        found = {name.lower(): value for name, value in response.getheaders()}
        return response.status, found, response.read()


def document(host: RunningHost, **headers: str) -> Any:
    status, _, body = send_request(host, "GET", "/openapi.json", **headers)
    assert status == 200, body
    return json.loads(body)


def test_the_root_leads_to_the_page_and_the_log_has_its_address(host: RunningHost) -> None:
    status, headers, _ = send_request(host, "GET", "/")
    assert (status, headers["location"]) == (307, "docs")
    host.wait_for(f"Models can be tried at http://{host.http_url}/docs")
    assert document(host)["info"]["title"] == "pbhost: models of triton"


# The document


def test_the_document_is_openapi(host: RunningHost) -> None:
    openapi_spec_validator.validate(document(host))


def test_models_are_described_by_version(host: RunningHost) -> None:
    api = document(host)
    names = {(m["name"], m["version"], m["latest"]) for m in api["x-models"]}
    assert ("half", "1", False) in names
    assert ("half", "2", True) in names
    assert "broken" not in {name for name, _, _ in names}
    assert "/v2/models/half/versions/1/infer" in api["paths"]
    schema = api["paths"]["/v2/models/add_sub/infer"]["post"]["requestBody"]["content"][
        "application/json"
    ]["schema"]
    first, second = schema["properties"]["inputs"]["prefixItems"]
    assert (first["properties"]["name"], second["properties"]["name"]) == (
        {"const": "INPUT0"},
        {"const": "INPUT1"},
    )
    assert first["properties"]["datatype"] == {"const": "FP32"}
    assert first["properties"]["shape"]["prefixItems"] == [
        {"type": "integer", "minimum": 1, "maximum": 8},
        {"const": 4},
    ]


def test_only_usable_operations_are_described(host: RunningHost) -> None:
    paths = document(host)["paths"]
    assert "/v2/models/words/generate_stream" in paths
    assert "/v2/models/words/infer" not in paths
    assert "/v2/models/words/generate" not in paths
    assert "/v2/models/half/generate" not in paths
    assert "/v2/models/stateful_accumulator/generate" not in paths
    assert list(paths["/v2/models/half/infer"]["post"]["requestBody"]["content"]) == [
        "application/octet-stream"
    ]


def test_every_example_is_answered(host: RunningHost) -> None:
    asked = 0
    for path, item in document(host)["paths"].items():
        for method, operation in item.items():
            body = operation.get("requestBody", {"content": {}})
            example = body["content"].get("application/json", {}).get("example")
            if example is not None:
                status, _, answer = send_request(host, method.upper(), path, example)
                assert status == 200, (path, example, answer)
                asked += 1
    assert asked > 10


def test_the_document_follows_what_is_loaded(host: RunningHost) -> None:
    path = "/v2/models/identity_types/infer"
    assert path in document(host)["paths"]
    assert send_request(host, "POST", "/v2/repository/models/identity_types/unload")[0] == 200
    assert path not in document(host)["paths"]
    assert send_request(host, "POST", "/v2/repository/models/identity_types/load")[0] == 200
    assert path in document(host)["paths"]


def test_the_endpoint_matches_the_openapi_document(host: RunningHost) -> None:
    settings = {
        "base-url": f"http://{host.http_url}",
        "seed": 1,
        "continue-on-failure": True,
        "request-timeout": DEADLINE,
        "suppress-health-check": ["too_slow"],  # of the machine, not of the document
        "phases": {
            "stateful": {"enabled": False},
            "coverage": {"unexpected-methods": ["DELETE"]},
        },
        "generation": {
            "max-examples": 2,
            "deterministic": True,
            "no-shrink": True,
            "database": "none",
        },
        # The protocol has 500 for JSON of a wrong form, and shapes say what a schema cannot.
        "checks": {
            "not_a_server_error": {"enabled": False},
            "positive_data_acceptance": {"enabled": False},
            "negative_data_rejection": {"enabled": False},
        },
    }
    import schemathesis
    from schemathesis.engine import events, from_schema

    schema = schemathesis.openapi.from_dict(
        document(host), config=schemathesis.Config.from_dict(settings)
    ).exclude(path_regex="/versions/|half|identity_types|stateful|twice|add_sub/generate_stream")
    statuses: set[int] = set()
    wrong: list[str] = []
    for event in from_schema(schema).execute():
        if isinstance(event, (events.NonFatalError, events.FatalError)):
            wrong.append(repr(event))
        if not isinstance(event, events.ScenarioFinished):
            continue
        recorder = event.recorder
        for checks in recorder.checks.values():
            wrong += [
                f"{recorder.label}: {check.failure_info.failure}"
                for check in checks
                if check.failure_info is not None
            ]
        for interaction in recorder.interactions.values():
            response = interaction.response
            assert response is not None
            statuses.add(response.status_code)
            known = UNREADABLE if response.status_code == 500 else REFUSED
            if response.status_code >= 500 and not (
                known.search(response.text) or REFUSED.search(response.text)
            ):
                wrong.append(f"{recorder.label}: {response.status_code} {response.text}")
    assert not wrong, "\n".join(wrong[:10])
    assert statuses >= {200, 400, 404, 405, 500}


# Access


@pytest.fixture(scope="module")
def restricted(
    host: RunningHost, module_repository: RepositoryBuilder, module_serve: Serve
) -> RunningHost:
    return module_serve(
        module_repository,
        "--model-control-mode=explicit",
        "--load-model=add_sub",
        "--http-restricted-api=metadata,model-repository:Admin-Key=the secret",
        "--http-restricted-api=inference:infer-key=another one",
    ).wait_started()


def test_a_restricted_document_needs_its_header(restricted: RunningHost) -> None:
    status, _, body = send_request(restricted, "GET", "/openapi.json")
    assert status == 403
    assert json.loads(body) == {"error": "This API is restricted, expecting header 'Admin-Key'"}
    assert send_request(restricted, "GET", "/docs")[0] == 200


def test_restricted_operations_say_which_header_opens_them(restricted: RunningHost) -> None:
    api = document(restricted, admin_key="the secret")
    openapi_spec_validator.validate(api)
    schemes = api["components"]["securitySchemes"]
    assert {name: scheme["name"] for name, scheme in schemes.items()} == {
        "metadata": "Admin-Key",
        "model-repository": "Admin-Key",
        "inference": "infer-key",
    }
    infer = api["paths"]["/v2/models/add_sub/infer"]["post"]
    assert infer["security"] == [{"inference": []}]
    assert "403" in infer["responses"]
    assert "security" not in api["paths"]["/v2/models/add_sub/config"]["get"]
    assert "secret" not in json.dumps(api)


def test_it_can_be_turned_off(repository: RepositoryBuilder, serve: Serve) -> None:
    host = serve(repository, "--http-api-page=false").wait_started()
    for path in ("/docs", "/openapi.json"):
        status, _, body = send_request(host, "GET", path)
        assert (status, json.loads(body)) == (404, {"error": "Not Found"})


# The page


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    with open_browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


class Page(WebPage):
    """The page of a host, about one of its models."""

    def __init__(self, browser: webdriver.Chrome, host: RunningHost, place: str = "") -> None:
        super().__init__(browser, host, f"/docs{place}")

    def send(self, status: str, **values: str) -> None:
        """Fills in a form and sends it; returns once the status is of this pattern."""
        for label, value in values.items():
            self.fill(label, value)
        self.press("Send")
        self.wait_for("#status", status)

    def outputs(self) -> list[list[str]]:
        """The cells of the table of the answer."""
        rows = self.browser.find_elements(By.CSS_SELECTOR, "#outputs tbody tr")
        return [[cell.text for cell in row.find_elements(By.TAG_NAME, "td")] for row in rows]


@pytest.fixture(autouse=True)
def the_browser_has_nothing_to_complain_of(request: pytest.FixtureRequest) -> Iterator[None]:
    """Scripts ran, and what the policy forbids was not tried."""
    yield
    if "browser" in request.fixturenames:
        assert not complaints(request.getfixturevalue("browser"))


def test_the_page_lists_the_models(host: RunningHost, browser: webdriver.Chrome) -> None:
    page = Page(browser, host)
    listed = page.wait_for("#models", "words")
    assert "add_sub\nREADY" in listed
    assert "half version 1\nREADY\nhalf version 2\nREADY" in listed
    assert page.text("h2") == "add_sub"
    assert "INPUT0 FP32 [-1, 4]" in page.text("table[aria-label=Inputs]")
    assert "DIFFERENCE FP32 [-1, 4]" in page.text("table[aria-label=Outputs]")


def test_failed_models_are_red_and_say_why_and_others_are_not(
    host: RunningHost, browser: webdriver.Chrome
) -> None:
    with host.client() as client:
        client.unload_model("identity_types")
        wait_until(
            lambda: any(
                (model.name, model.reason) == ("identity_types", "unloaded")
                for model in client.get_model_repository_index().models
            ),
            "the end of the unload",
        )
    try:
        page = Page(browser, host)
        page.wait_for("#models", "unloaded")
        bad = browser.find_elements(By.CSS_SELECTOR, "#models .gone:has(.state.bad)")
        broken, unreadable = sorted(entry.text for entry in bad)
        assert broken.startswith("broken")
        assert unreadable.startswith("unreadable")
        assert "max_batch_size" in unreadable
    finally:
        with host.client() as client:
            client.load_model("identity_types")


def test_server_texts_are_not_interpreted_as_html(
    host: RunningHost, browser: webdriver.Chrome
) -> None:
    page = Page(browser, host)
    assert MARKUP in page.wait_for("#models .gone", "broken")
    assert not browser.find_elements(By.TAG_NAME, "img")


def test_a_form_sends_what_is_entered(host: RunningHost, browser: webdriver.Chrome) -> None:
    page = Page(browser, host, "#add_sub/1")
    page.wait_for("h2", "add_sub")
    page.send(r"^200 OK · [0-9.]+ ms", INPUT0="[[1, 2, 3, 4]]")
    assert page.outputs() == [
        ["SUM", "FP32", "[1, 4]", "[[2, 3, 4, 5]]"],
        ["DIFFERENCE", "FP32", "[1, 4]", "[[0, 1, 2, 3]]"],
    ]


def test_a_refusal_is_shown_as_the_server_words_it(
    host: RunningHost, browser: webdriver.Chrome
) -> None:
    page = Page(browser, host, "#add_sub/1")
    page.wait_for("h2", "add_sub")
    page.send("^400 Bad Request", INPUT0="[[1, 2, 3]]")
    assert "unexpected shape for input 'INPUT0'" in page.wait_for("#error", "INPUT0")
    page.fill("INPUT0", "[[1, 2")
    page.press("Send")
    page.wait_for("#error", "^INPUT0 is not JSON: ")


def test_every_kind_of_value_is_shown_as_it_is(
    host: RunningHost, browser: webdriver.Chrome
) -> None:
    page = Page(browser, host, "#identity_types/1")
    page.wait_for("h2", "identity_types")
    entered = {
        "INT64": "[9007199254740993]",
        "FP16": "[0.1, -Infinity]",
        "FP64": "[0.12345678901234568, NaN]",
        "STRING": '["ü <b>", ""]',
    }
    page.send("^200 OK", **{f"{name}_IN": value for name, value in entered.items()})
    shown = {name.removesuffix("_OUT"): data for name, _, _, data in page.outputs()}
    assert shown == {**entered, "FP16": "[0.0999755859375, -Infinity]"}


def test_tensors_without_a_json_form_travel_as_bytes(
    host: RunningHost, browser: webdriver.Chrome
) -> None:
    page = Page(browser, host, "#half/1")
    page.wait_for("h2", "half")
    page.send("^200 OK", X="[0.5, 65504]", B="[1.01, -3]")
    assert page.outputs() == [
        ["X", "FP16", "[2]", "[0.5, 65504]"],
        ["B", "BF16", "[2]", "[1.0078125, -3]"],
    ]


@pytest.mark.parametrize("place", ["#half/2", "#add_sub/1"], ids=["bytes", "json"])
def test_the_curl_command_sends_the_same_request(
    host: RunningHost, browser: webdriver.Chrome, place: str
) -> None:
    page = Page(browser, host, place)
    command = page.wait_for("#curl", "^(curl|{ printf)")
    page.send("^200 OK")
    done = subprocess.run(["sh", "-c", command], capture_output=True, check=True, timeout=DEADLINE)
    head = browser.find_element(By.ID, "text").get_property("textContent")
    assert isinstance(head, str)
    assert done.stdout.startswith(head.encode())
    assert done.stdout[len(head) :] == (b"\x00\x3c" if place == "#half/2" else b"")


def test_responses_of_a_decoupled_model_are_listed(
    host: RunningHost, browser: webdriver.Chrome
) -> None:
    page = Page(browser, host, "#words/1")
    page.wait_for("h2", "words")
    page.send("· 3 responses$", TEXT='["to be or"]')
    assert page.outputs() == [
        ["1", "WORD", "BYTES", '["to"]'],
        ["2", "WORD", "BYTES", '["be"]'],
        ["3", "WORD", "BYTES", '["or"]'],
    ]


def test_a_stream_can_be_stopped(host: RunningHost, browser: webdriver.Chrome) -> None:
    page = Page(browser, host, "#words/1")
    page.wait_for("h2", "words")
    page.send(r"· \d+ responses$", TEXT='["forever"]')
    page.press("Stop")
    page.wait_for("#error", r"^Stopped\.$")
    page.send("· 2 responses$", TEXT='["or not"]')  # the model is free again
    assert page.outputs()[1] == ["2", "WORD", "BYTES", '["not"]']


@pytest.mark.parametrize("place", ["#twice/1", "#stateful_accumulator/1"])
def test_examples_of_the_page_are_answered(
    host: RunningHost, browser: webdriver.Chrome, place: str
) -> None:
    page = Page(browser, host, place)
    page.wait_for("h2", place[1:-2])
    page.send("^200 OK")
    assert page.outputs()


def test_the_page_needs_nothing_from_elsewhere(
    host: RunningHost, browser: webdriver.Chrome
) -> None:
    _, headers, body = send_request(host, "GET", "/docs")
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert not re.search(rb"https?://", body)
    page = Page(browser, host)
    page.wait_for("h2", "add_sub")
    names = browser.execute_script(
        "return performance.getEntriesByType('resource').map((entry) => entry.name)"
    )
    assert names
    assert all(name.startswith(f"http://{host.http_url}/") for name in names)


def test_the_page_requests_keys(restricted: RunningHost, browser: webdriver.Chrome) -> None:
    page = Page(browser, restricted)
    page.wait_for("#trouble", "^This API is restricted, expecting header 'Admin-Key'$")
    page.fill("Admin-Key", "the secret")
    page.press("Use")
    page.wait_for("h2", "add_sub")
    page.fill("INPUT0", "[[1, 2, 3, 4]]")
    page.press("Send")
    page.wait_for("#error", "^This API is restricted, expecting header 'infer-key'$")
    page.fill("infer-key", "another one")
    page.press("Use")
    page.wait_for("#curl", "infer-key: another one")
    page.send("^200 OK")
    assert page.outputs()[0] == ["SUM", "FP32", "[1, 4]", "[[2, 3, 4, 5]]"]


def test_the_page_requests_an_api_key(
    serve: Serve, repository: RepositoryBuilder, tmp_path: Path, browser: webdriver.Chrome
) -> None:
    shutil.copytree(EXAMPLES / "add_sub", repository.path / "add_sub")
    keys = tmp_path / "keys"
    keys.write_text("the-only-key\n")
    page = Page(browser, serve(repository, f"--api-key-file={keys}").wait_started())
    page.wait_for("#trouble", "^this server needs an API key: Authorization: Bearer KEY$")
    page.fill("API key", "another-key")
    page.press("Use")
    page.wait_for("#trouble", "^unknown API key$")
    page.fill("API key", "the-only-key")
    page.press("Use")
    page.wait_for("h2", "add_sub")
    page.wait_for("#curl", "Authorization: Bearer the-only-key")
    page.fill("INPUT0", "[[1, 2, 3, 4]]")
    page.send("^200 OK")


@pytest.fixture(scope="module")
def chat_host(module_serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> RunningHost:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("the-only-key\n")
    folder = RepositoryBuilder(tmp_path_factory.mktemp("chat"))
    messages = LETTERS_CONFIG.replace('"last"', '"plain"').replace("acme/letters", "acme/talk")
    folder.add("letters", LETTERS, LETTERS_CONFIG)
    folder.add("talk", LETTERS, messages)
    shutil.copytree(EXAMPLES / "add_sub", folder.path / "add_sub")
    return module_serve(folder, f"--openai-api-key-file={keys}").wait_started()


class Chat(Page):
    """The chat panel of a model, with the API key filled in."""

    def __init__(self, browser: webdriver.Chrome, host: RunningHost, model: str) -> None:
        super().__init__(browser, host, f"#{model}/1")
        self.wait_for("h2", f"^{model}$")
        self.browser.find_element(By.CSS_SELECTOR, "#chat-options summary").click()
        self.fill("API key", "the-only-key")

    def say(self, text: str) -> None:
        self.fill("Message", text)
        self.press("Send message")

    def wait_for_answer(self, turn: int, pattern: str) -> None:
        """Waits until the answer of a turn (counted from 1) has such a text and is complete."""
        self.wait_for(f".turn:nth-child({2 * turn}) .said", pattern)
        self.wait_for("#turns[aria-busy=false] h4", "^You$")


def test_a_chat_answer_is_streamed_with_its_rate(
    chat_host: RunningHost, browser: webdriver.Chrome
) -> None:
    page = Chat(browser, chat_host, "letters")
    page.say("al|pha")
    page.wait_for_answer(1, "^alpha$")
    figures = page.text(".turn:nth-child(2) .figures")
    assert re.fullmatch(r"2 tokens · [\d.]+ tokens/s · first after [\d.]+ ms", figures)
    assert "the-only-key" not in browser.current_url


def test_a_chat_has_the_turns_before(chat_host: RunningHost, browser: webdriver.Chrome) -> None:
    page = Chat(browser, chat_host, "talk")
    page.say("one")
    page.wait_for_answer(1, "user: one")
    page.say("two")
    page.wait_for_answer(2, r"^user: one\s+assistant: user: one[\s\S]*user: two")
    page.press("New conversation")
    page.say("three")
    page.wait_for_answer(1, "user: three")
    assert "one" not in page.text("#turns")


def test_a_stopped_chat_cancels_the_request_of_the_model(
    chat_host: RunningHost, browser: webdriver.Chrome
) -> None:
    page = Chat(browser, chat_host, "letters")
    page.say("begun|WAIT")
    page.wait_for(".turn:nth-child(2) .said", "^begun$")
    page.press("Stop answer")
    page.wait_for(".turn:nth-child(2) .figures", "stopped$")
    wait_until(lambda: "cancelled b'begun|WAIT'" in chat_host.output, "the cancellation")
    page.say("again")
    page.wait_for_answer(2, "^again$")


def test_chat_errors_are_shown_in_words(chat_host: RunningHost, browser: webdriver.Chrome) -> None:
    page = Chat(browser, chat_host, "letters")
    page.say("begun|FAIL")
    page.wait_for("#chat-error", "the model is tired")
    page.fill("API key", "another-key")
    page.say("hello")
    page.wait_for("#chat-error", "API key")
    page.fill("API key", "the-only-key")
    page.say("hello")
    page.wait_for_answer(3, "^hello$")
    assert page.text("#chat-error") == ""


def test_chat_texts_are_not_interpreted_as_html(
    chat_host: RunningHost, browser: webdriver.Chrome
) -> None:
    page = Chat(browser, chat_host, "letters")
    page.say(MARKUP)
    page.wait_for_answer(1, re.escape(MARKUP))
    assert not browser.find_elements(By.TAG_NAME, "img")


def test_only_models_that_speak_chat_have_a_chat_panel(
    chat_host: RunningHost, browser: webdriver.Chrome
) -> None:
    page = Page(browser, chat_host, "#add_sub/1")
    page.wait_for("h2", "^add_sub$")
    assert not browser.find_elements(By.ID, "chat")
    page = Page(browser, chat_host, "#talk/1")
    page.wait_for("h2", "^talk$")
    assert browser.find_elements(By.ID, "chat")
    assert 'model="talk"' in page.text("#openai")


def test_a_failed_model_can_be_opened_and_says_why(
    host: RunningHost, browser: webdriver.Chrome
) -> None:
    page = Page(browser, host)
    page.wait_for("#models", "broken")
    browser.find_element(By.PARTIAL_LINK_TEXT, "broken").click()
    page.wait_for("h2", "^broken$")
    assert MARKUP in page.text("#reason.bad")
    assert not browser.find_elements(By.TAG_NAME, "img")


def test_the_search_hides_other_models(host: RunningHost, browser: webdriver.Chrome) -> None:
    page = Page(browser, host)
    page.wait_for("#models", "words")
    page.fill("Search models", "HALF")
    assert re.findall("[a-z_]+ version", page.text("#models")) == ["half version"] * 2
    assert "words" not in page.text("#models")
    page.fill("Search models", "no such model")
    page.wait_for("#nomatch", r"^No model matches\.$")


def test_the_python_snippet_sends_the_same_request(
    host: RunningHost, browser: webdriver.Chrome
) -> None:
    page = Page(browser, host, "#add_sub/1")
    page.wait_for("h2", "^add_sub$")
    page.fill("INPUT0", "[[1, 2, 3, 4]]")
    page.wait_for("#python", r"\[\[1, 2, 3, 4\]\]")
    done = subprocess.run(
        [sys.executable, "-c", page.text("#python")],
        capture_output=True, text=True, timeout=DEADLINE, check=False,
    )  # fmt: skip
    assert "[[2. 3. 4. 5.]]" in done.stdout, done.stderr


def test_a_copy_button_says_that_it_copied(host: RunningHost, browser: webdriver.Chrome) -> None:
    page = Page(browser, host)
    page.wait_for("h2", "add_sub")
    page.wait_for("#curl", "^curl")
    script = "document.addEventListener('copy', () => { window.copied = String(getSelection()); });"
    browser.execute_script(
        script + "navigator.clipboard.writeText = async (text) => { window.copied = text; };"
    )
    page.press("Copy")
    wait_until(lambda: browser.execute_script("return window.copied"), "the copy")
    assert browser.execute_script("return window.copied") == page.text("#curl")


def test_the_times_of_tokens_are_shown(chat_host: RunningHost, browser: webdriver.Chrome) -> None:
    page = Chat(browser, chat_host, "letters")
    page.say("a|b|c")
    page.wait_for_answer(1, "^abc$")
    page.wait_for(
        "#tokens", r"To the first token, p50\s[\d.]+ m?s[\s\S]*Between tokens, p99\s[\d.]+ m?s"
    )
    Page(browser, chat_host, "#add_sub/1").wait_for("h2", "^add_sub$")
    assert not browser.find_elements(By.ID, "tokens")


def test_crashes_of_a_model_are_shown(
    repository: RepositoryBuilder, serve: Serve, browser: webdriver.Chrome
) -> None:
    repository.copy("identity", "script")
    host = serve(repository).wait_started()
    (stub,) = host.stubs("identity_0")
    stub.send_signal(signal.SIGABRT)
    host.wait_for("restarted")
    page = Page(browser, host, "#identity/1")
    page.wait_for("#crashes summary", "identity_0 · .*SIGABRT")
    browser.find_element(By.CSS_SELECTOR, "#crashes summary").click()
    page.wait_for("#crashes pre", r"Stacks:[\s\S]*File")
    browser.find_element(By.PARTIAL_LINK_TEXT, "script").click()
    page.wait_for("h2", "^script$")
    assert not browser.find_elements(By.ID, "crashes")


def test_the_quarantine_of_a_model_is_shown_and_can_be_lifted(
    repository: RepositoryBuilder, serve: Serve, browser: webdriver.Chrome, tmp_path: Path
) -> None:
    repository.copy("misbehave")
    flags = (f"--crash-directory={tmp_path}", "--crash-tensor-byte-size=100")
    host = serve(repository, *flags).wait_started()
    for _ in range(2):
        kill_stub(host, "aborts", request_id="culprit")
    page = Page(browser, host, "#misbehave/1")
    page.wait_for("#quarantine li", r"culprit: COMMAND BYTES \[1\]; until ")
    browser.find_element(By.CSS_SELECTOR, "#crashes summary").click()
    page.wait_for("#crashes .tensors", "^this server does not send the tensors .*--allow-recording")
    page.press("Lift the quarantine")
    browser.switch_to.alert.accept()
    wait_until(lambda: not browser.find_elements(By.ID, "quarantine"), "the end of the list")


def test_the_quarantine_is_shown_also_without_records_of_crashes(
    repository: RepositoryBuilder, serve: Serve, browser: webdriver.Chrome
) -> None:
    repository.copy("misbehave")
    host = serve(repository, "--crash-records=0").wait_started()
    for _ in range(2):
        kill_stub(host, "aborts", request_id="culprit")
    page = Page(browser, host, "#misbehave/1")
    page.wait_for("#quarantine li", "culprit")


def test_pages_link_to_each_other_if_both_are_served(
    host: RunningHost, repository: RepositoryBuilder, serve: Serve
) -> None:
    assert b'href="dashboard"' in send_request(host, "GET", "/docs")[2]
    assert b'href="docs"' in send_request(host, "GET", "/dashboard")[2]
    alone = serve(repository, "--http-dashboard=false").wait_started()
    assert b'href="dashboard"' not in send_request(alone, "GET", "/docs")[2]
