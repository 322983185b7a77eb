"""The log of a real host: whose lines they are, as text and as JSON, and its settings."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.http as httpclient
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from tests.clients import infer_error, run_command, tensor
from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve, wait_until

CONFIG = """
    input [ { name: "COMMAND", data_type: TYPE_STRING, dims: [ 1 ] } ]
    output [ { name: "ANSWER", data_type: TYPE_STRING, dims: [ 1 ] } ]
    """
CHATTY = """
    import logging
    import threading
    import numpy as np
    import triton_python_backend_utils as pb_utils

    log = logging.getLogger("chatty")

    def say(what, text):
        if what == "verbose":
            pb_utils.Logger.log_verbose(text)
        elif what == "logger":
            pb_utils.Logger.log_warn(text)
        elif what == "print":
            print(text)
        elif what == "exception":
            try:
                raise ValueError(text)
            except ValueError:
                log.exception("it failed")
        elif what == "raise":
            raise ValueError(text)
        elif what == "thread":
            thread = threading.Thread(target=log.info, args=(text,))
            thread.start()
            thread.join()
        elif what == "setlevel":
            logging.getLogger("quiet").setLevel(text)
            logging.getLogger("quiet").debug("heard by missing")
            logging.getLogger("quiet").error("heard %s", "by all")
        else:
            getattr(log, what)("%s", text)

    def answer(request):
        given = pb_utils.get_input_tensor_by_name(request, "COMMAND").as_numpy().ravel()
        what, _, text = given[0].decode().partition("=")
        say(what, text)
        shape = pb_utils.get_input_tensor_by_name(request, "COMMAND").shape()
        output = np.full(shape, "said", dtype=np.object_)
        return pb_utils.InferenceResponse([pb_utils.Tensor("ANSWER", output)])

    class TritonPythonModel:
        def execute(self, requests):
            return [answer(request) for request in requests]
    """
COROUTINE = CHATTY.replace("        def execute", "        async def execute")
BATCHES = """
    max_batch_size: 2
    dynamic_batching { preferred_batch_size: [ 2 ] max_queue_delay_microseconds: 60000000 }
    """
CONFIGURED = (
    "    import logging\n    logging.basicConfig(level=logging.DEBUG, format='mine: %(message)s')\n"
) + CHATTY


@pytest.fixture(scope="module")
def models(module_repository: RepositoryBuilder) -> RepositoryBuilder:
    module_repository.add("chatty", CHATTY, CONFIG, version=3)
    module_repository.add("together", CHATTY, CONFIG + BATCHES)
    module_repository.add("coroutine", COROUTINE, CONFIG)
    module_repository.add("configured", CONFIGURED, CONFIG)
    return module_repository


@pytest.fixture(scope="module")
def host(models: RepositoryBuilder, module_serve: Serve) -> RunningHost:
    host = module_serve(models, "--log-format=json", "--log-verbose=1")
    host.wait_for(r"Started HTTPService at")
    # The text that `wait_started` looks for ends with the quotation mark of the JSON string.
    host.port = int(host.wait_for(r"Started GRPCInferenceService at [0-9.]+:(\d+)").group(1))
    return host


def lines(host: RunningHost) -> list[dict[str, Any]]:
    return [json.loads(line) for line in list(host.lines)]


def line(host: RunningHost, text: str) -> dict[str, Any]:
    """The one line whose message contains a text, once it is there, without what varies."""

    def found() -> list[dict[str, Any]]:
        return [line for line in lines(host) if text in line["message"]]

    wait_until(lambda: bool(found()), f"a line with {text!r}")
    (one,) = found()
    assert one.pop("time").endswith("Z") and one.pop("pid") == host.process.pid
    return one


def say(host: RunningHost, text: str, request_id: str = "", model: str = "chatty") -> None:
    with host.client() as client:
        assert run_command(client, text, model, request_id=request_id) == "said"


WHOSE = {"model": "chatty", "version": 3, "instance": "chatty_0"}


# Lines


def test_a_line_of_the_logger_says_whose_it_is(host: RunningHost) -> None:
    say(host, "logger=from the logger", "id 1")
    shown = line(host, "from the logger")
    assert shown.pop("source").startswith("model.py:")
    assert shown == {
        "level": "WARNING", **WHOSE, "request_id": "id 1", "message": "from the logger",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("method", "level"), [("info", "INFO"), ("warning", "WARNING"), ("critical", "ERROR")]
)
def test_pythons_logging_goes_to_the_hosts_log(host: RunningHost, method: str, level: str) -> None:
    say(host, f"{method}=by {method}", "id 2")
    shown = line(host, f"by {method}")
    assert shown.pop("source").startswith("model.py:")
    assert shown == {
        "level": level, **WHOSE, "request_id": "id 2", "message": f"by {method}",
    }  # fmt: skip


def test_an_exception_that_is_logged_has_its_traceback(host: RunningHost) -> None:
    say(host, "exception=logged", "id 3")
    message = line(host, "it failed")["message"]
    assert message.startswith("it failed\nTraceback (most recent call last):\n")
    assert message.endswith("ValueError: logged")


def test_levels_of_pythons_loggers_count(host: RunningHost) -> None:
    say(host, "setlevel=ERROR")
    assert line(host, "heard by all")["level"] == "ERROR"
    assert "heard by missing" not in host.output
    say(host, "debug=not at this level")
    say(host, "info=after it")
    line(host, "after it")
    assert "not at this level" not in host.output


def test_a_line_of_another_thread_names_no_request(host: RunningHost) -> None:
    say(host, "thread=by a thread", "id 4")
    shown = line(host, "by a thread")
    assert "request_id" not in shown
    assert {name: shown[name] for name in WHOSE} == WHOSE


def test_a_line_of_a_coroutine_names_its_request(host: RunningHost) -> None:
    say(host, "info=by a coroutine", "id 5", model="coroutine")
    assert line(host, "by a coroutine")["request_id"] == "id 5"


def test_a_model_that_configures_logging_gets_what_it_asks_for(host: RunningHost) -> None:
    say(host, "debug=in my way", model="configured")
    shown = line(host, "in my way")
    assert (shown["message"], shown["stream"]) == ("mine: in my way", "stderr")


def test_a_printed_line_says_which_stream_it_came_by(host: RunningHost) -> None:
    say(host, "print=printed", "id 6")
    assert line(host, "printed") == {
        "level": "INFO", "stream": "stdout", **WHOSE, "message": "printed",
    }  # fmt: skip


def test_a_failure_of_execute_names_its_request(host: RunningHost) -> None:
    with host.client() as client:
        infer_error(run_command, client, "raise=no good", "chatty", request_id="id 7")
    shown = line(host, "no good")
    assert (shown["level"], shown["request_id"]) == ("ERROR", "id 7")


def test_a_line_of_a_batch_names_all_of_its_requests(host: RunningHost) -> None:
    done: list[Any] = []
    given = np.array([[b"info=of a batch"], [b"print=x"]], dtype=np.object_)
    with host.client() as client:
        for number in range(2):
            client.async_infer(
                "together",
                [tensor("COMMAND", given[number : number + 1])],
                lambda result, error: done.append(error),
                request_id=f"part {number}",
            )
        wait_until(lambda: len(done) == 2, "both answers")
    assert done == [None, None]
    assert sorted(line(host, "of a batch")["request_ids"]) == ["part 0", "part 1"]


def test_lines_about_a_model_name_it(host: RunningHost) -> None:
    assert line(host, "successfully loaded 'chatty'")["model"] == "chatty"
    shown = line(host, "loading: chatty:3")
    assert (shown["model"], shown["version"]) == ("chatty", 3)


def test_every_line_is_an_object(host: RunningHost) -> None:
    assert all(isinstance(line, dict) for line in lines(host))
    assert "| chatty" in line(host, "| Version |")["message"]


def test_a_line_of_text_has_model_version_instance_and_request(
    models: RepositoryBuilder, serve: Serve
) -> None:
    host = serve(models, "--model-control-mode=explicit", "--load-model=chatty").wait_started()
    say(host, "logger=hello", "id 8")
    say(host, "logger=nameless")
    say(host, "print=hello")
    host.wait_for(r"W\d+ .* model.py:\d+\] \[chatty:3/chatty_0 id 8\] hello\n")
    host.wait_for(r"W\d+ .* model.py:\d+\] \[chatty:3/chatty_0\] nameless\n")
    host.wait_for(r"(?m)^\[chatty:3/chatty_0\] hello$")


# Settings

DEFAULTS = {
    "log_file": "",
    "log_info": True,
    "log_warning": True,
    "log_error": True,
    "log_verbose_level": 1,
    "log_format": "json",
}


class Endpoint:
    """Log settings over one protocol; errors as (status, text)."""

    def __init__(self, host: RunningHost, protocol: str) -> None:
        self._protocol = protocol
        self._host = host

    def get(self) -> dict[str, Any]:
        return self._http(None) if self._protocol == "http" else self.set({})

    def set(self, settings: dict[str, Any]) -> dict[str, Any]:
        if self._protocol == "http":
            return self._http(json.dumps(settings).encode())
        request = pb.LogSettingsRequest()
        for name, value in settings.items():
            kind = {bool: "bool_param", int: "uint32_param", str: "string_param"}[type(value)]
            setattr(request.settings[name], kind, value)
        with grpc.insecure_channel(self._host.url) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            shown = stub.LogSettings(request, timeout=DEADLINE)
        return {
            name: getattr(value, value.WhichOneof("parameter_choice"))
            for name, value in shown.settings.items()
        }

    def _http(self, body: bytes | None) -> dict[str, Any]:
        url = f"http://{self._host.http_url}/v2/logging"
        with urllib.request.urlopen(url, body, DEADLINE) as answer:
            shown: dict[str, Any] = json.load(answer)
            return shown

    def fails(self, settings: Any) -> str:
        """Status and text of a change that is refused."""
        if self._protocol == "grpc":
            with pytest.raises(grpc.RpcError) as failed:
                self.set(settings)
            return f"{failed.value.code().name} {failed.value.details()}"
        with pytest.raises(urllib.error.HTTPError) as caught:
            self.set(settings)
        with caught.value as error:
            return f"{error.code} {json.load(error)['error']}"


@pytest.fixture(params=["grpc", "http"])
def endpoint(request: pytest.FixtureRequest, host: RunningHost) -> Iterator[Endpoint]:
    endpoint = Endpoint(host, request.param)
    yield endpoint
    endpoint.set({name: value for name, value in DEFAULTS.items() if name != "log_file"})


def test_settings_are_shown(endpoint: Endpoint) -> None:
    assert endpoint.get() == DEFAULTS


def test_a_level_that_is_switched_off_is_not_logged(
    endpoint: Endpoint, host: RunningHost, request: pytest.FixtureRequest
) -> None:
    name = request.node.callspec.id
    changed = endpoint.set({"log_info": False, "log_verbose_level": 0})
    assert (changed["log_info"], changed["log_verbose_level"]) == (False, 0)
    say(host, f"info=unheard by {name}")
    say(host, f"verbose=unheard by {name}")
    say(host, f"warning=heard by {name} still")
    line(host, f"heard by {name} still")
    assert endpoint.set({"log_info": True, "log_verbose_level": 1}) == DEFAULTS
    say(host, f"verbose=heard by {name} again")
    assert line(host, f"heard by {name} again")["level"] == "VERBOSE"
    assert f"unheard by {name}" not in host.output


def test_unknown_log_settings_are_ignored(endpoint: Endpoint) -> None:
    assert endpoint.set({"log_colour": "red"}) == DEFAULTS


def test_settings_before_an_invalid_one_stay(endpoint: Endpoint) -> None:
    assert "log_format" in endpoint.fails({"log_error": False, "log_format": "xml"})
    assert endpoint.get()["log_error"] is False


def test_null_is_ignored_over_http(host: RunningHost) -> None:
    http = Endpoint(host, "http")
    assert http.set({"log_info": None, "log_file": None}) == DEFAULTS
    with httpclient.InferenceServerClient(host.http_url) as client:
        assert client.update_log_settings(None) == DEFAULTS


FILE = "log file location can not be updated through network protocol"
FORMAT = "log_format, got: xml"
REFUSED = [
    ("http", {"log_file": "x"}, f"501 {FILE}"),
    ("grpc", {"log_file": "x"}, f"UNIMPLEMENTED {FILE}"),
    ("http", {"log_info": 1}, "500 attempt to access JSON non-boolean as boolean"),
    ("grpc", {"log_error": "x"}, "INVALID_ARGUMENT expect boolean for 'log_error'"),
    (
        "http",
        {"log_verbose_level": "x"},
        "500 attempt to access JSON non-unsigned-integer as unsigned-integer",
    ),
    (
        "grpc",
        {"log_verbose_level": True},
        "INVALID_ARGUMENT expect int32 for 'log_verbose_level'",
    ),
    ("http", {"log_format": "xml"}, f"503 invalid argument for --{FORMAT}"),
    ("grpc", {"log_format": "xml"}, f"INVALID_ARGUMENT invalid argument for {FORMAT}"),
    ("http", {"log_format": 1}, "500 attempt to access JSON non-string as string"),
    ("grpc", {"log_format": True}, "INVALID_ARGUMENT expect string for 'log_format'"),
]


@pytest.mark.parametrize(
    ("protocol", "settings", "expected"), REFUSED, ids=[str(n) for n in range(len(REFUSED))]
)
def test_an_invalid_log_setting_is_refused(
    host: RunningHost, protocol: str, settings: dict[str, Any], expected: str
) -> None:
    assert Endpoint(host, protocol).fails(settings) == expected


def test_changes_need_a_json_object(host: RunningHost) -> None:
    assert Endpoint(host, "http").fails([]) == "500 attempt to get members for non-object"


def test_the_format_can_be_changed_while_the_host_runs(
    models: RepositoryBuilder, serve: Serve
) -> None:
    host = serve(models, "--model-control-mode=explicit", "--load-model=chatty").wait_started()
    endpoint = Endpoint(host, "grpc")
    for log_format, pattern in (
        ("ISO8601", r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ I \d+ model.py:\d+\] .* as ISO8601"),
        ("json", r'\{"time":.*"message":"as json"\}'),
        ("default", r"I\d{4} \d\d:\d\d:\d\d\.\d{6} \d+ model.py:\d+\] .* as default"),
    ):
        assert endpoint.set({"log_format": log_format})["log_format"] == log_format
        say(host, f"info=as {log_format}")
        host.wait_for(pattern)


def test_the_log_goes_to_a_file(models: RepositoryBuilder, serve: Serve, tmp_path: Any) -> None:
    path = tmp_path / "log"
    host = serve(
        models, f"--log-file={path}", "--model-control-mode=explicit", "--load-model=chatty",
    )  # fmt: skip
    wait_until(lambda: path.exists() and "Started HTTPService" in path.read_text(), "the start")
    assert host.stop() == 0
    assert "successfully unloaded 'chatty' version 3" in path.read_text()
    assert host.output.strip() == "Signal (15) received."


def test_in_json_every_line_is_json_also_of_a_signal_and_of_a_failed_start(
    models: RepositoryBuilder, serve: Serve
) -> None:
    host = serve(models, "--log-format=json").wait_started()
    failed = serve(models, "--log-format=json", "--http-address=192.0.2.1")  # of no machine
    failed.process.wait(DEADLINE)
    assert host.stop() == 0
    wait_until(lambda: "creating server" in failed.output, "the error")
    misused = serve(models, "--log-format", "json", "--grcp-port=1")
    assert misused.process.wait(DEADLINE) == 1
    misused.wait_for("did you mean '--grpc-port'")
    assert json.loads(misused.lines[0])["level"] == "ERROR"
    lines = [json.loads(line)["message"] for line in (*host.lines, *failed.lines)]
    assert "Signal (15) received." in lines
    assert lines[-1] == "error: creating server: failed to start HTTP service"
    assert "Unavailable - Socket '192.0.2.1:0'" in lines[-2]
