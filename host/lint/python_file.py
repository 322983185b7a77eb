"""Checks a model's Python file without running it: syntax, class and method of the model."""

from __future__ import annotations

import ast
import warnings
from pathlib import Path

from host.lint.habits import find_habits
from host.lint.problem import Problem
from host.system.regular_file import read_file

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
