"""Checks a Python file of a model: syntax, imports, and habits that go wrong under a server."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from host.config.findings import Problem
from host.system.files import read_file

_INSTANCE_ARGUMENTS = ("model_instance_name", "model_instance_device_id")
_Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


class Habit(NamedTuple):
    """What is found at a node, and what to do instead."""

    node: ast.stmt | ast.expr
    text: str
    advice: str


def find_habits(tree: ast.Module, model: str, batches: bool) -> Iterator[Habit]:
    """Yields the habits of a model's file.

    `model`: the name of the model's class. `batches`: `execute` may get several requests.
    """
    batches = batches or any(_is_call_of(node, "set_dynamic_batching") for node in ast.walk(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == model:
            for method in node.body:
                if isinstance(method, _Function) and method.name == "initialize":
                    yield from _find_staggered_sleeps(method)
                if isinstance(method, _Function) and method.name == "execute" and batches:
                    yield from _find_early_returns(method)
                if isinstance(method, _Function) and method.name == "sequences_expired":
                    yield from _check_sequences_expired(method)
        if isinstance(node, ast.ExceptHandler) and node.name:
            yield from _find_exceptions_as_texts(node, node.name)
        for block in ("body", "orelse", "finalbody"):
            if isinstance(statements := getattr(node, block, None), list):
                yield from _find_repeated_responses(statements)


def _find_staggered_sleeps(initialize: _Function) -> Iterator[Habit]:
    """Yields sleeps whose time depends on the name or the device of the instance."""
    known: set[str] = set()
    while (more := _derived_names(initialize, known)) != known:
        known = more
    for node in _own_nodes(initialize.body):
        if (
            isinstance(node, ast.Call)
            and _is_call_of(node, "sleep")
            and any(_names_instance(part) or _is_name(part, known) for part in ast.walk(node))
        ):
            yield Habit(
                node,
                "initialize sleeps by the instance, which delays each load and restart",
                "the parameter MAX_INITIALIZING_INSTANCES limits how many instances initialise"
                " at the same time",
            )


def _find_early_returns(execute: _Function) -> Iterator[Habit]:
    """Yields returns inside a loop over the requests, unless they respond to all of them."""
    if len(execute.args.args) < 2:
        return
    requests = execute.args.args[1].arg
    for loop in _own_nodes(execute.body):
        if not isinstance(loop, ast.For) or not _mentions(loop.iter, {requests}):
            continue
        inside = list(_own_nodes(loop.body))
        whole = {
            target.id
            for node in _own_nodes(execute.body)
            if isinstance(node, ast.Assign) and node not in inside
            and _mentions(node.value, {requests})
            for target in node.targets
            if isinstance(target, ast.Name)
        }  # fmt: skip
        for node in inside:
            if isinstance(node, ast.Return) and not (
                node.value is not None and _mentions(node.value, {requests} | whole)
            ):
                yield Habit(
                    node,
                    "execute returns inside the loop over its requests: the others of a batch get"
                    " no response",
                    "append the response to a list, and return the list after the loop",
                )


def _check_sequences_expired(method: _Function) -> Iterator[Habit]:
    """Yields the method if a call with the ids alone fails."""
    given = method.args
    static = any(_is_name(decorator, {"staticmethod"}) for decorator in method.decorator_list)
    count = 1 if static else 2  # with `self`
    positional = len(given.posonlyargs) + len(given.args)
    most = positional if given.vararg is None else max(positional, count)
    missing = any(default is None for default in given.kw_defaults)
    if missing or not positional - len(given.defaults) <= count <= most:
        yield Habit(
            method,
            "sequences_expired gets the ids of the sequences and nothing else: each call fails",
            "write def sequences_expired(self, correlation_ids)",
        )


def _find_exceptions_as_texts(handler: ast.ExceptHandler, name: str) -> Iterator[Habit]:
    """Yields errors that are made of the exception itself."""
    for node in _own_nodes(handler.body):
        if isinstance(node, ast.Call) and _is_call_of(node, "TritonError"):
            first = [*node.args[:1], *(k.value for k in node.keywords if k.arg == "message")]
            if any(_is_name(value, {name}) for value in first):
                yield Habit(
                    node,
                    "the message of TritonError is an exception, which raises a TypeError",
                    f"write TritonError(str({name}))",
                )


def _find_repeated_responses(statements: Sequence[ast.stmt]) -> Iterator[Habit]:
    """Yields responses that a loop has sent, and that are sent again with the final flag."""
    sent: dict[str, str] = {}  # the last response of a loop, and its sender
    for statement in statements:
        call = _sending_call(statement)
        if call is not None:
            response, sender, final = call
            if final and sent.get(response) == sender:
                yield Habit(
                    statement,
                    f"the last '{response}' of the loop is sent again with the final flag",
                    "send the flag alone: send(flags=TRITONSERVER_RESPONSE_COMPLETE_FINAL)",
                )
        for name in _assigned_names(statement):
            sent.pop(name, None)
        if isinstance(statement, ast.For | ast.AsyncFor | ast.While):
            for part in statement.body:
                for name in _assigned_names(part):
                    sent.pop(name, None)
                inner = _sending_call(part)
                if inner is not None and not inner[2]:
                    sent[inner[0]] = inner[1]


def _sending_call(statement: ast.stmt) -> tuple[str, str, bool] | None:
    """The name of the response, the sender, and whether flags are given, of `X.send(NAME)`."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
        return None
    if call.func.attr != "send" or not (call.args and isinstance(call.args[0], ast.Name)):
        return None
    flags = [*call.args[1:], *(keyword.value for keyword in call.keywords)]
    return call.args[0].id, ast.unparse(call.func.value), bool(flags)


def _assigned_names(statement: ast.stmt) -> set[str]:
    return {
        node.id
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def _derived_names(function: _Function, known: set[str]) -> set[str]:
    """The names assigned from the instance's arguments, or from the known names."""
    return known | {
        target.id
        for node in _own_nodes(function.body)
        if isinstance(node, ast.Assign)
        and any(_names_instance(part) or _is_name(part, known) for part in ast.walk(node.value))
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _names_instance(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value in _INSTANCE_ARGUMENTS


def _own_nodes(statements: Sequence[ast.stmt]) -> Iterator[ast.AST]:
    """The nodes of statements, without those of functions and classes inside."""
    todo: list[ast.AST] = list(statements)
    while todo:
        node = todo.pop(0)
        yield node
        todo += [] if isinstance(node, _FUNCTIONS) else ast.iter_child_nodes(node)


def _mentions(node: ast.AST, names: set[str]) -> bool:
    return any(_is_name(part, names) for part in ast.walk(node))


def _is_name(node: ast.AST, names: set[str]) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def _is_call_of(node: ast.AST, function: str) -> bool:
    """Whether a node calls `function` or `<something>.function`."""
    if not isinstance(node, ast.Call):
        return False
    called = node.func
    return function in (getattr(called, "attr", None), getattr(called, "id", None))


_CLASS = "TritonPythonModel"
_COMPLETES, _EXECUTE = "auto_complete_config", "execute"


class PythonFile:
    """An existing Python file.

    `problems` are the findings. `may_complete` says whether the model may have
    `auto_complete_config`. It is True if that is unknown: the file cannot be read, or the class is
    imported, decorated or has base classes. `batches`: `execute` may get several requests.
    """

    def __init__(self, path: Path, batches: bool = False) -> None:
        self.problems: list[Problem] = []
        self.may_complete = True
        try:
            source = read_file(path)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(source)
                compile(source, str(path), "exec", dont_inherit=True)
        except OSError as error:
            self.problems.append(Problem(path, f"failed to read file: {error.strerror}"))
        except SyntaxError as error:
            at = (error.lineno, max(1, error.offset or 1)) if error.lineno else None
            text = f"{type(error).__name__}: {error.msg}"
            self.problems.append(Problem(path, text, position=at))
        except (ValueError, RecursionError, MemoryError) as error:
            text = f"it cannot be parsed as Python: {error or type(error).__name__}"
            self.problems.append(Problem(path, text))
        else:
            self._inspect(path, tree)
            for node, text, advice in find_habits(tree, _CLASS, batches):
                at = (node.lineno, node.col_offset + 1)
                self.problems.append(Problem(path, text, "", advice, at, warning=True))

    def _inspect(self, path: Path, tree: ast.Module) -> None:
        places = [node for node in ast.walk(tree) if _may_bind(node, _CLASS)]
        if not places:
            text, advice = f"it has no class {_CLASS}", "a model must define this class"
            self.problems.append(Problem(path, text, advice=advice))
        own = places[0] if len(places) == 1 else None
        if isinstance(own, ast.ClassDef) and not (own.bases or own.decorator_list or own.keywords):
            inside = [node for part in own.body for node in ast.walk(part)]
            self.may_complete = any(_may_bind(node, _COMPLETES) for node in inside)
            if not any(_may_bind(node, _EXECUTE) for node in inside):
                text, advice = f"{_CLASS} has no method {_EXECUTE}", "every request will fail"
                at = own.lineno, own.col_offset + 1
                self.problems.append(Problem(path, text, advice=advice, position=at, warning=True))


def _may_bind(node: ast.AST, name: str) -> bool:
    """Whether a syntax node may define the name."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return node.name == name
    if isinstance(node, ast.alias):
        return (node.asname or node.name) in (name, "*")
    if isinstance(node, ast.Constant):
        return node.value == name  # globals()[...], setattr
    return isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store)
