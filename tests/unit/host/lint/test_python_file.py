"""A model's Python file is compiled and not run."""

from __future__ import annotations

from pathlib import Path

import pytest

from host.config.findings import Position
from host.lint.python_file import PythonFile

EXECUTE = "    def execute(self, requests): pass\n"
COMPLETE = "    @staticmethod\n    def auto_complete_config(config): return config\n"


def look(folder: Path, source: str | bytes) -> PythonFile:
    path = folder / "model.py"
    path.write_bytes(source if isinstance(source, bytes) else source.encode())
    return PythonFile(path)


@pytest.mark.parametrize(
    ("source", "position", "text"),
    [
        ("def f(:\n", (1, 7), "SyntaxError: invalid syntax"),
        ("x = 1\n  y = 2\n", (2, 2), "IndentationError: unexpected indent"),
        ("\n\nreturn 5\n", (3, 1), "SyntaxError: 'return' outside function"),
        ("x = 1\n", None, "it has no class TritonPythonModel"),
    ],
    ids=["syntax", "indent", "return", "class"],
)
def test_a_problem_is_reported_with_its_position(
    tmp_path: Path, source: str, position: Position | None, text: str
) -> None:
    (problem,) = look(tmp_path, source).problems
    assert (problem.position, problem.text, problem.warning) == (position, text, False)


def test_a_model_that_can_answer_no_request_is_warned_of(tmp_path: Path) -> None:
    (problem,) = look(
        tmp_path, "import a\nclass TritonPythonModel:\n    def execut(self, requests): ...\n"
    ).problems
    assert problem.format_line.endswith(
        "model.py:2:1: warning: TritonPythonModel has no method execute (every request will fail)"
    )
    for more in ("execute = run", "from m import execute", "setattr(self, 'execute', run)"):
        assert not look(tmp_path, f"class TritonPythonModel:\n    {more}\n").problems


@pytest.mark.parametrize(
    "source",
    [b"x = '\xff'\n", b"x = 1\0\n", b"(" * 5000, b"-" * 100_000 + b"1", b"# coding: what\n"],
    ids=["not UTF-8", "NUL", "brackets", "signs", "encoding"],
)
def test_a_file_that_cannot_be_compiled_is_a_problem_and_not_a_crash(
    tmp_path: Path, source: bytes
) -> None:
    file = look(tmp_path, source)
    assert len(file.problems) == 1
    assert file.may_complete


def test_the_code_does_not_run(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    assert not look(
        tmp_path, f"open({str(trace)!r}, 'w')\nclass TritonPythonModel:\n{EXECUTE}"
    ).problems
    assert not trace.exists()


@pytest.mark.parametrize(
    ("source", "may_complete"),
    [
        (f"class TritonPythonModel:\n{EXECUTE}", False),
        (f"class TritonPythonModel:\n{EXECUTE}{COMPLETE}", True),
        (f"class TritonPythonModel(Base):\n{EXECUTE}", True),
        (f"@wrapped\nclass TritonPythonModel:\n{EXECUTE}", True),
        ("from other import Model as TritonPythonModel\n", True),
        ("from other import *\n", True),
        ("TritonPythonModel = make()\n", True),
        ("globals()['TritonPythonModel'] = make()\n", True),
        ("if FAST:\n    TritonPythonModel = make()\nelse:\n    class TritonPythonModel: 1", True),
    ],
    ids=[
        "plain", "completing", "derived", "decorated", "imported", "star", "assigned", "dynamic",
        "twice",
    ],
)  # fmt: skip
def test_a_class_that_is_not_defined_plainly_may_complete_its_configuration(
    tmp_path: Path, source: str, may_complete: bool
) -> None:
    file = look(tmp_path, source)
    assert file.problems == []
    assert file.may_complete is may_complete


RETURNS = """\
    def execute(self, requests):
        responses = []
        for request in requests:
            if failed:
                return [error]
            responses.append(response)
        return responses
"""
SLEEPS = """\
    def initialize(self, args):
        number = int(args["model_instance_name"].split("_")[-1])
        seconds = 5 * number
        time.sleep(seconds)
"""
CATCHES = """\
        try:
            work()
        except Exception as error:
            return [pb_utils.InferenceResponse(error=pb_utils.TritonError(error))]
"""
REPEATS = """\
    def stream(self, sender, tokens):
        for token in tokens:
            response = pb_utils.InferenceResponse([token])
            sender.send(response)
        sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
HOLDS_BACK = REPEATS.replace("            sender.send(response)\n", "").replace(
    "            response =", "            sender.send(response)\n            response ="
)


@pytest.mark.parametrize(
    ("body", "line", "text"),
    [
        (RETURNS, 6, "execute returns inside the loop over its requests"),
        (RETURNS.replace("in requests:", "in zip(range(9), requests):"), 6, "execute returns"),
        (RETURNS.replace("return [error]", "return None"), 6, "execute returns"),
        (SLEEPS + EXECUTE, 5, "initialize sleeps by the instance"),
        (SLEEPS.replace("time.sleep", "sleep") + EXECUTE, 5, "initialize sleeps"),
        (EXECUTE[:-5] + "\n" + CATCHES, 6, "the message of TritonError is an exception"),
        (REPEATS + EXECUTE, 6, "the last 'response' of the loop is sent again"),
        (EXECUTE + "    def sequences_expired(self): pass\n", 3, "sequences_expired gets the ids"),
        (EXECUTE + "    async def sequences_expired(self, a, b): 1\n", 3, "sequences_expired gets"),
        (EXECUTE + "    def sequences_expired(self, a, *, b): 1\n", 3, "sequences_expired gets"),
    ],
)
def test_a_habit_that_loses_responses_or_time_is_warned_of(
    tmp_path: Path, body: str, line: int, text: str
) -> None:
    path = tmp_path / "model.py"
    path.write_text(f"class TritonPythonModel:\n{body}")
    (problem,) = PythonFile(path, batches=True).problems
    assert problem.text.startswith(text) and problem.warning
    assert problem.position is not None and problem.position[0] == line


@pytest.mark.parametrize(
    "body",
    [
        RETURNS.replace("return [error]", "return [error for _ in requests]"),
        RETURNS.replace("return [error]", "return self.fail(requests)"),
        RETURNS.replace("responses = []", "responses = [error] * len(requests)").replace(
            "return [error]", "return responses"
        ),
        RETURNS.replace("return [error]", "check = lambda: [error]"),
        RETURNS.replace("in requests:", "in self.parts:"),
        SLEEPS.replace("seconds)", "1)") + EXECUTE,
        SLEEPS.replace("time.sleep", "self.place") + EXECUTE,
        EXECUTE[:-5] + "\n" + CATCHES.replace("Error(error)", "Error(str(error))"),
        REPEATS.replace("        sender.send(response, f", "        sender.send(f") + EXECUTE,
        REPEATS.replace("        sender.send(response, f", "        sender.send(last, f") + EXECUTE,
        # The last response is held back.
        REPEATS.replace("sender.send(response)\n", "self.hold(response)\n") + EXECUTE,
        HOLDS_BACK + EXECUTE,
        EXECUTE + "    async def sequences_expired(self, ids, why=None): pass\n",
        EXECUTE + "    def sequences_expired(*given, more=1): pass\n",
        EXECUTE + "    @staticmethod\n    def sequences_expired(ids): pass\n",
    ],
)  # fmt: skip
def test_a_habit_that_is_none_is_not_warned_of(tmp_path: Path, body: str) -> None:
    path = tmp_path / "model.py"
    path.write_text(f"class TritonPythonModel:\n{body}")
    assert PythonFile(path, batches=True).problems == []


def test_a_return_inside_the_loop_is_right_if_requests_come_one_at_a_time(tmp_path: Path) -> None:
    source = f"class TritonPythonModel:\n{RETURNS}"
    assert look(tmp_path, source).problems == []
    (problem,) = look(tmp_path, source + "config.set_dynamic_batching()\n").problems
    assert problem.text.startswith("execute returns")
