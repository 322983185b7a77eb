"""What a frontend process knows of the models that can be found."""

from __future__ import annotations

from host.config.schema import ModelConfig, new_config
from host.errors import HostError
from host.frontend_processes.core_link import CoreLink, CoreSilent
from host.frontend_processes.messages import FindModel
from host.models.registry import NotServedError

_MAX_ENTRIES = 4096
_MAX_NAME_LENGTH = 512  # of a model that is remembered


class ModelTable:
    """The configurations of models, and the errors for those that are not found.

    Each is asked for once, until any model changes: the core shows that in shared memory, before
    a client can know of the change.
    """

    def __init__(self, link: CoreLink) -> None:
        self._link = link
        self._generation = -1
        self._known: dict[tuple[str, int], ModelConfig | HostError] = {}

    def find(self, model: str, version: int) -> ModelConfig:
        """The configuration of a model; -1 is the latest version. Raises HostError."""
        generation = self._link.state.generation
        if generation != self._generation or len(self._known) > _MAX_ENTRIES:
            self._known.clear()
            self._generation = generation
        known = self._known.get((model, version))
        if known is None:
            known = self._ask(model, version)
            if len(model) <= _MAX_NAME_LENGTH:
                self._known[(model, version)] = known
        if isinstance(known, HostError):
            raise _copy_error(known)
        return known

    def _ask(self, model: str, version: int) -> ModelConfig | HostError:
        number = next(self._link.numbers)
        try:
            data = self._link.ask_now(FindModel(number, model, version), number)
        except CoreSilent:
            raise
        except HostError as error:
            return _copy_error(error)
        config = new_config()
        config.ParseFromString(data)
        return config


def _copy_error(error: HostError) -> HostError:
    """A new error: one that is raised again would collect tracebacks."""
    kind = NotServedError if isinstance(error, NotServedError) else HostError
    return kind(error.code, error.message)
