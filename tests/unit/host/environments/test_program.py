"""Running programs: output, time limits, and the end of all their processes."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest

from host.environments.program import ProgramError, command_dying_with_host, run_program
from tests.conftest import DEADLINE, wait_until


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def failure(work: Coroutine[Any, Any, list[str]]) -> ProgramError:
    with pytest.raises(ProgramError) as caught:
        asyncio.run(work)
    return caught.value


def test_every_line_is_reported_and_the_last_ones_are_returned() -> None:
    heard: list[str] = []
    code = "import sys\nfor i in range(50): print(i)\nsys.stderr.write('no end')"
    last = asyncio.run(run_program(python(code), timeout_s=DEADLINE, on_line=heard.append))
    assert len(heard) == 51
    assert set(last) <= set(heard)
    assert len(last) == 20


def test_a_very_long_line_is_reported_in_pieces() -> None:
    heard: list[str] = []
    asyncio.run(
        run_program(python("print('x' * 100_000)"), timeout_s=DEADLINE, on_line=heard.append)
    )
    assert "".join(heard) == "x" * 100_000
    assert len(heard) > 1


def test_the_end_of_a_very_long_line_is_in_the_error() -> None:
    code = "print('progress\\r' * 3000 + 'the reason'); raise SystemExit(1)"
    assert failure(run_program(python(code), timeout_s=DEADLINE)).output[-1].endswith("the reason")


def test_a_status_other_than_zero_is_an_error_with_the_output() -> None:
    error = failure(run_program(python("print('why'); raise SystemExit(4)"), timeout_s=DEADLINE))
    assert error.status == 4
    assert str(error).endswith("ended with status 4")
    assert error.details == f"{error}; it printed:\nwhy"


def test_a_program_that_cannot_be_started_is_an_error() -> None:
    error = failure(run_program(["/nowhere/python"], timeout_s=DEADLINE))
    assert error.details == "'/nowhere/python' cannot be run: No such file or directory"
    assert error.status is None


FAMILY = """
import os, signal, sys
if os.fork() == 0:
    print(os.getpid(), flush=True)
{parent}
signal.pause()
"""


@pytest.mark.parametrize("parent", ["", "else: sys.exit(0)"], ids=["waits", "leaves"])
def test_a_program_over_its_time_limit_is_killed_with_its_children(parent: str) -> None:
    pids: list[int] = []
    for seconds in (1.0, 5.0, 25.0):  # long enough for the child to start
        error = failure(
            run_program(
                python(FAMILY.format(parent=parent)),
                timeout_s=seconds,
                on_line=lambda line: pids.append(int(line)),
            )
        )
        assert str(error).endswith(
            f"was killed after {seconds:g} s, the limit of --environment-timeout-secs"
        )
        assert error.status is None
        if pids:
            break
    wait_until(lambda: not psutil.pid_exists(pids[0]) or is_zombie(pids[0]), "the child's end")


def is_zombie(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_program_is_killed_when_its_caller_is_cancelled() -> None:
    async def main() -> int:
        pid: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        running = asyncio.ensure_future(
            run_program(
                python("import os, signal; print(os.getpid(), flush=True); signal.pause()"),
                timeout_s=DEADLINE,
                on_line=lambda line: pid.set_result(int(line)),
            )
        )
        number = await pid
        running.cancel()
        await asyncio.wait([running])
        assert running.cancelled()
        return number

    assert not psutil.pid_exists(asyncio.run(main()))


def test_a_module_or_script_cannot_import_from_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise RuntimeError('the wrong one')")
    script = tmp_path / "script"
    script.write_text("import json, sys\nprint(sys.argv[1:], __name__)")

    async def main() -> list[str]:
        table = tmp_path / "table.json"
        table.write_text("{}")
        module = command_dying_with_host(sys.executable, "json.tool", table)
        told = await run_program(module, timeout_s=DEADLINE, cwd=tmp_path)
        return told + await run_program(
            command_dying_with_host(sys.executable, script, "-x"), timeout_s=DEADLINE, cwd=tmp_path
        )

    assert asyncio.run(main()) == ["{}", "['-x'] __main__"]


def test_an_error_names_the_program_and_not_its_wrapper() -> None:
    command = command_dying_with_host(sys.executable, "json.tool", "/nowhere")
    error = failure(run_program(command, name="json.tool", timeout_s=DEADLINE))
    assert str(error).startswith("'json.tool' ended with status ")


def test_the_program_ends_with_the_process_that_started_it() -> None:
    code = """
import asyncio, os, sys
from host.environments.program import command_dying_with_host, run_program

def heard(line):
    print(line, flush=True)
    os.kill(os.getpid(), 9)

command = command_dying_with_host(sys.executable, sys.argv[1])
asyncio.run(run_program(command, timeout_s=60, on_line=heard))
"""
    script = Path(os.environ["TMPDIR"]) / "endless.py"
    script.write_text("import os, signal\nprint(os.getpid(), flush=True)\nsignal.pause()")
    error = failure(run_program([*python(code), script], timeout_s=DEADLINE))
    assert error.status == -9
    pid = int(error.output[0])
    wait_until(lambda: not psutil.pid_exists(pid) or is_zombie(pid), "the program's end")


HOOKS = """
import os, sys, uvloop
from host.environments.program import run_program

os.register_at_fork(after_in_child=lambda: os._exit(77))
uvloop.run(run_program([sys.executable, "-c", "pass"], timeout_s=60))
"""


def test_fork_handlers_do_not_run_when_a_program_starts() -> None:
    """gRPC's fork handlers can crash the child, and uvloop's way to start a program runs them."""
    asyncio.run(run_program(python(HOOKS), timeout_s=DEADLINE))
