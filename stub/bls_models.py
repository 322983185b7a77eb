"""The models that a model under `pbhost run` calls (BLS): loaded when they are called."""

import os
import sys
import threading
import traceback
from typing import Any, Callable, Dict, Iterator, List, Mapping, Set, Tuple

import pb_utils
from pb_utils import testing
from pb_utils._model_texts import unknown_model
from stub.wire.paths import real_path


class BlsModels(Mapping[str, testing.ModelHarness]):
    """The models of a repository by name. Each one is loaded in this process on its first use.

    The modules and import paths of one model are hidden while another one is imported, so that
    their modules may have the same names.
    """

    def __init__(
        self,
        described: Mapping[str, Mapping[str, Any]],
        timeout: float,
        on_log: Callable[[testing.LogRecord], None],
    ) -> None:
        """Creates the models, without loading one.

        Args:
            described: for each model the arguments `directory`, `version`, `backend` and `config`
                of `testing.load`, or `problem`, the reason why it cannot be loaded.
            timeout: time limit in seconds for responses.
            on_log: gets the log messages of the models.
        """
        self._described = described
        self._timeout = timeout
        self._on_log = on_log
        self._loaded: Dict[str, testing.ModelHarness] = {}
        self._failed: Set[str] = set()
        self._directories: List[str] = []
        self._lock = threading.RLock()  # reentrant, because `initialize` may query another model

    def add(self, model: testing.ModelHarness, directory: str) -> None:
        """Adds a loaded model, which the others may call. The caller closes it."""
        self._loaded[model.args["model_name"]] = model
        self._directories.append(directory)

    def __getitem__(self, name: str) -> testing.ModelHarness:
        """Returns a model; loads it if it is not loaded.

        Raises:
            KeyError: there is no such model.
            TritonModelException: it cannot be loaded. The first time, the reason is printed.
        """
        with self._lock:
            if name in self._failed:
                raise _failed_load(name)
            if name not in self._loaded:
                self._load(name, self._described[name])
            return self._loaded[name]

    def __contains__(self, name: object) -> bool:
        """Tells whether there is such a model, without loading it."""
        return name in self._loaded or name in self._described

    def __iter__(self) -> Iterator[str]:
        """Iterates over the names of all models."""
        return iter({**self._loaded, **self._described})

    def __len__(self) -> int:
        """Returns the number of models."""
        return len({**self._loaded, **self._described})

    def close(self) -> None:
        """Finalizes the models that were loaded here. Prints exceptions of `finalize`."""
        for name, model in reversed(list(self._loaded.items())):
            if name in self._described:
                try:
                    model.close()
                except Exception:  # any exception of a model's code
                    traceback.print_exc()

    def _load(self, name: str, described: Mapping[str, Any]) -> None:
        try:
            if "problem" in described:
                raise pb_utils.TritonModelException(described["problem"])
            modules, path = self._hide_models()
            try:
                model = testing.load(
                    described["directory"],
                    described["config"],
                    version=described["version"],
                    models=self,
                    response_timeout=self._timeout,
                    backend=described["backend"] or None,
                    on_log=self._on_log,
                )
            finally:
                self._show_models(modules, path)
        except (Exception, SystemExit) as error:
            self._failed.add(name)
            if not isinstance(error, pb_utils.TritonModelException):
                traceback.print_exc()
            sys.stderr.write(f"pbhost run: model '{name}' cannot be loaded: {error}\n")
            raise _failed_load(name) from error
        self._loaded[name] = model
        self._directories.append(described["directory"])

    def _hide_models(self) -> Tuple[Dict[str, Any], List[str]]:
        """Removes modules and paths of the loaded models; returns what was there before."""
        modules = {
            name: module for name, module in sys.modules.items() if self._is_of_model(module)
        }
        for name in modules:
            del sys.modules[name]
        path = sys.path[:]
        sys.path[:] = [folder for folder in path if not self._is_inside(folder)]
        return modules, path

    def _show_models(self, modules: Mapping[str, Any], path: List[str]) -> None:
        """Restores modules and paths; paths of the new model come last."""
        sys.modules.update(modules)
        sys.path[:] = path + [folder for folder in sys.path if folder not in path]

    def _is_of_model(self, module: Any) -> bool:
        places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
        return any(isinstance(place, str) and self._is_inside(place) for place in places)

    def _is_inside(self, path: str) -> bool:
        real = real_path(path)
        return any(
            real == directory or real.startswith(directory + os.sep)
            for directory in map(real_path, self._directories)
        )


def _failed_load(name: str) -> pb_utils.TritonModelException:
    """Returns the error of a model that could not be loaded, with the text of a server."""
    return pb_utils.TritonModelException(unknown_model(name, "has no available versions"))
