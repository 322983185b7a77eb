"""Checks the folders of models: configurations, files, code, and the steps of ensembles."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path

from google.protobuf import text_format

from host.config.defaults import (
    apply_version_policy,
    find_versions,
    is_version,
)
from host.config.findings import ConfigSource, Finding, Position, Problem
from host.config.model_config import (
    ConfigSettings,
    LoadedConfig,
    config_file,
    iterate_findings,
    read_config_text,
    read_unchecked_config,
)
from host.config.pbtxt import fill_known_variables, parse_pbtxt
from host.config.schema import ModelConfig, closest_choice, is_ensemble, new_config
from host.config.validate import check_tensors
from host.ensembles.compatibility import check_step_models, iterate_misfits
from host.environments.model_environments import check_environment, needs_environment
from host.errors import HostError
from host.frontends.openai.contract_compiler import check_defaults, compile_contract
from host.frontends.openai.load_hook import (
    check_adapters,
    check_contract,
    check_tokenizer,
    find_template_fault,
)
from host.frontends.openai.model_files import read_chat_template
from host.inference.validation import Signature
from host.lint.python_file import PythonFile
from host.lint.recovering_reader import RecoveringReader
from host.model_control.dependency_graph import (
    DependencyGraph,
    circular_dependency_error,
    models_unavailable_error,
    version_not_loaded_error,
)
from host.models.backends import Backends, is_shipped_source
from host.models.registry import Registry
from host.models.warmup import Warmup
from host.options.options import Options
from host.repository.model_directory import (
    ModelDirectory,
    list_served_versions,
    list_versions,
    model_file_path,
    read_labels,
    run_agents,
    select_versions,
)
from host.scheduling.sequence_call import read_states
from pb_utils import _model_texts as texts
from pb_utils._api_modules import API_MODULES, describe_copy, is_copy


def find_copies(directory: Path) -> Iterator[Problem]:
    """Yields a warning for each copy of the API in a model's folder. Reads files, so it blocks."""
    for folder, names, files in os.walk(directory):
        # A file on the path of imports: of the model's folder, or of one of its versions.
        whole = Path(folder) == directory or _is_version(Path(folder), directory)
        for file in map(Path, sorted([*files, *(f"{name}/__init__.py" for name in names)])):
            name = file.parts[0].removesuffix(".py")
            path = folder / file
            if whole and name in API_MODULES:
                found = path.is_file()
            else:
                found = name in (API_MODULES[0], "pb_utils") and is_copy(str(path))
            if found:
                fact, advice = describe_copy(packaged=not whole)
                yield Problem(path, f"it {fact}", advice=advice, warning=True)
        # Only what can be imported: data and environments may be large.
        names[:] = [
            name
            for name in names
            if name not in API_MODULES
            and (name.isidentifier() or _is_version(folder / Path(name), directory))
        ]


def _is_version(folder: Path, directory: Path) -> bool:
    return folder.parent == directory and folder.name.isdigit()


_FILE_BY_CAPABILITY = ("pytorch", "tensorrt")
"""The backends that use `cc_model_filenames` on a GPU."""
_GRAPHDEF = "tensorflow_graphdef"


def find_missing_files(config: ModelConfig, path: Path) -> Iterator[Problem]:
    """Yields the problem of a version whose model file, `path`, is missing or of the wrong kind.

    The texts are those of the backends. The file is not opened. A missing file is a warning if the
    backend may open another one, because of the GPU that it runs on. Reads folders, so it blocks.
    """
    by_capability = config.cc_model_filenames if config.backend in _FILE_BY_CAPABILITY else {}
    missing = _describe_missing_file(config, path)
    if missing:
        yield Problem(
            path,
            missing,
            "default_model_filename",
            _advise(config.default_model_filename, path),
            warning=bool(by_capability),
        )
    for capability, name in sorted(by_capability.items()):
        other = path.parent / name
        if not other.is_file():
            text = f"unable to find '{other}' for model '{config.name}'"
            field = f"cc_model_filenames[{capability}]"
            yield Problem(path, text, field, _advise(name, other), warning=True)


def _describe_missing_file(config: ModelConfig, path: Path) -> str:
    """Returns the error of the backend, "" if the file is there."""
    if config.backend == "onnxruntime":
        if not path.exists():
            return f"failed to stat file {path}"
        path = path / "model.onnx" if path.is_dir() else path
        found = path.is_file()
    elif config.backend == "tensorflow" and config.platform != _GRAPHDEF:
        found = path.is_dir()
    else:
        found = path.is_file()
    return "" if found else f"unable to find '{path}' for model '{config.name}'"


def _advise(name: str, path: Path) -> str:
    """Returns what to do about a missing file: use one of the same type, if there is one."""
    folder = path.parent
    others = [
        entry.name
        for entry in (sorted(folder.iterdir()) if folder.is_dir() else ())
        if entry.suffix == path.suffix and entry != path
    ]
    other = closest_choice(name, others) or (others[0] if len(others) == 1 else "")
    if other:
        return f"did you mean '{other}', which is in this folder?"
    return "put the model's file there, or name another file"


_SMALL_BYTES = 1 << 20
_TEXTS = (".py", ".json", ".jinja")
_LOG = logging.getLogger("pbhost")
_OPTIONS = Options()
_FIRST_PART = re.compile(r"\w*(\[\d+\])?")


@dataclass(frozen=True)
class LintSettings:
    """The server options that the check depends on."""

    backends: Backends
    strict: bool = False
    config_name: str | None = None
    variables: Mapping[str, str] | None = None


@dataclass
class CheckedModel:
    """A model and the problems found so far.

    `config` is None if the file cannot be parsed. `source` has the positions of its fields.
    `complete` says whether all tensors are known without running the model. `guessed` has the
    fields whose values could not be read.
    """

    name: str
    directory: Path
    source: ConfigSource
    problems: list[Problem] = field(default_factory=list)
    config: ModelConfig | None = None
    versions: Sequence[int] = ()
    complete: bool = False
    guessed: frozenset[str] = frozenset()

    def add(
        self,
        text: str,
        field: str = "",
        advice: str = "",
        at: Position | None = None,
        warning: bool = False,
    ) -> None:
        """Adds a problem of the configuration, unless it is about a guessed field."""
        path = Path(self.source.path)
        path = path if path.exists() else self.directory
        at = at or self.source.position(field)
        if _first_part(field) not in self.guessed:
            self.problems.append(Problem(path, text, field, advice, at, warning))

    @contextmanager
    def report_to(self, field: str, advice: str = "") -> Iterator[None]:
        """Reports a HostError raised in the block as a problem of that field."""
        try:
            yield
        except HostError as error:
            self.add(error.message, field, advice)


def choose_files(directory: ModelDirectory, settings: LintSettings) -> Callable[[str, int], bool]:
    """Returns whether the check reads a file, by its path in the model and its size. Blocks.

    These are small files, text of known kinds, and what the configuration names, but not the
    weights, and not versions that the version policy leaves out. Raises HostError.
    """
    try:
        config = read_unchecked_config(directory.path, settings.config_name, settings.variables)
    except HostError:  # the check reports it
        config = new_config()
        config.version_policy.all.SetInParent()
    if not config.HasField("version_policy"):
        config.version_policy.latest.num_versions = 1
    versions = set(apply_version_policy(config, find_versions(directory.path)))
    config.ClearField("default_model_filename")
    config.ClearField("cc_model_filenames")
    named = text_format.MessageToString(config, as_utf8=True)

    def reads(path: str, size: int) -> bool:
        top, name = path.partition("/")[0], Path(path).name
        if is_version(top) and int(top) not in versions:
            return False
        return size <= _SMALL_BYTES or name.endswith(_TEXTS) or name in named

    return reads


def check_model(directory: ModelDirectory, settings: LintSettings) -> CheckedModel:
    """Checks a model without running it or reading other models. Reads files, so it blocks."""
    path = config_file(directory.path, settings.config_name)
    model = CheckedModel(directory.name, directory.path, ConfigSource(str(path)))
    handler = _Warnings(model)
    _LOG.addHandler(handler)
    try:
        model.config = _read(model, settings)
        if model.config is not None:
            _check_config(model, model.config, settings)
        else:
            _check_unconfigured(model)
    finally:
        _LOG.removeHandler(handler)
    return model


def _read(model: CheckedModel, settings: LintSettings) -> ModelConfig | None:
    """Parses the configuration file, repaired where possible. Returns None if it is unusable."""
    path = model.source.path
    config = None
    with model.report_to(""):
        text = read_config_text(Path(path), settings.strict)
        if text is None:
            return new_config()
        filling = settings.variables is not None
        reader = RecoveringReader(fill_known_variables(text, settings.variables or {}))
        reader.read_all(new_config().DESCRIPTOR)
        for problem in reader.problems:
            model.add(problem.text, problem.field, problem.hint, problem.position)
        for left in reader.leftovers:
            model.add(left.text, left.field, left.hint, left.position, warning=not filling)
        model.source = ConfigSource(path, reader.positions)
        # If a top-level field had to be guessed, further findings would be unreliable.
        if reader.repaired is not None and not any(map(str.isidentifier, reader.guessed)):
            config = parse_pbtxt(reader.repaired, path)
            model.guessed = frozenset(map(_first_part, reader.guessed))
    return config


def _check_unconfigured(model: CheckedModel) -> None:
    """Checks the Python files of a model whose configuration is unusable."""
    with model.report_to(""):
        files = (model.directory / str(v) / "model.py" for v in list_versions(model.directory))
        for path in filter(Path.is_file, files):
            model.problems += PythonFile(path).problems


def _check_config(model: CheckedModel, config: ModelConfig, settings: LintSettings) -> None:
    # The GPUs of the server are not known: assume those in the configuration, or else one.
    gpus = {gpu for group in config.instance_group for gpu in group.gpus} or {0}
    least = _OPTIONS.min_supported_compute_capability
    reading = ConfigSettings(gpus=sorted(gpus), least_capability=least)
    for one in iterate_findings(config, model.directory, model.name, reading):
        code = f"create {model.directory / '1' / 'model.py'}, or set 'backend'"
        unknown = one.text.startswith("Invalid model name: Could not determine backend")
        model.add(one.text, one.field, one.advice or (code if unknown else ""))
    may_complete = _check_versions(model, config, settings) and not settings.strict
    _check_tensors(model, config, may_complete)
    _check_files(model, config)
    _check_openai(model, config)


def _check_versions(model: CheckedModel, config: ModelConfig, settings: LintSettings) -> bool:
    """Checks the versions; returns whether the code of one may complete the configuration.

    Code that is missing or unknown may do so.
    """
    completes = not is_ensemble(config)
    advice = f"create the folder {model.directory / '1'}"
    with model.report_to("version_policy", advice):
        available = list_served_versions(model.directory, config)
        model.versions = select_versions(config, available)
        if not find_versions(model.directory):
            text = "the ensemble has no version folder: pbhost serves version 1, Triton refuses it"
            keep = f"{advice}, with an empty file if a tool drops empty folders"
            model.add(text, "platform", keep, warning=True)
    if config.backend and model.versions:
        completes = False
        for version in model.versions:
            code_completes = True
            with model.report_to("default_model_filename"):
                path = model_file_path(model.directory, version, config)
                code_completes = _check_code(model, config, version, path, settings)
            completes |= code_completes
    return completes


def _check_code(
    model: CheckedModel, config: ModelConfig, version: int, path: Path, settings: LintSettings
) -> bool:
    """Checks the code of one version; returns whether it may complete the configuration."""
    with model.report_to("backend"):
        source, _ = settings.backends.find_backend(
            model.directory, version, LoadedConfig(config, None)
        )
        if is_shipped_source(source) and config.default_model_filename:
            for problem in find_missing_files(config, path):
                model.add(problem.text, problem.field, problem.advice, warning=problem.warning)
        if source.backend:
            return True
        if not source.file.endswith(".py"):
            model.add(texts.no_python_file(source.file), "default_model_filename")
        elif not path.is_file():
            advice = "create this file with the model's code"
            model.add(texts.missing_file(path), "default_model_filename", advice)
        else:
            batches = config.HasField("dynamic_batching") or config.HasField("sequence_batching")
            file = PythonFile(path, batches)
            elsewhere = needs_environment(config)  # another Python version may accept it
            model.problems += [replace(problem, warning=elsewhere) for problem in file.problems]
            return file.may_complete
    return True


def _check_tensors(model: CheckedModel, config: ModelConfig, may_complete: bool) -> None:
    """Checks the tensors, except those that the model itself may still complete."""
    model.complete = not may_complete and not model.guessed
    unsaid = {
        f"{kind}[{index}]"
        for kind in ("input", "output")
        for index, tensor in enumerate(getattr(config, kind))
        if not (tensor.name and tensor.data_type and tensor.dims)
    }
    _check_duplicates(model, config)
    for one in check_tensors(config):
        unsure = _first_part(one.field) in unsaid or one.field.startswith("batch_")
        if not (may_complete and unsure):
            model.add(one.text, one.field, one.advice)


def _check_duplicates(model: CheckedModel, config: ModelConfig) -> None:
    """Warns of names that `input` or `output` lists twice."""
    for kind, effect in (
        ("input", "the entries count as one; Triton refuses every request to the model"),
        ("output", "a response contains it once"),
    ):
        seen: set[str] = set()
        for index, tensor in enumerate(getattr(config, kind)):
            if tensor.name and tensor.name in seen:
                text = f"{kind} '{tensor.name}' is listed more than once: {effect}"
                model.add(text, f"{kind}[{index}].name", "remove this entry", warning=True)
            seen.add(tensor.name)


def _check_files(model: CheckedModel, config: ModelConfig) -> None:
    for path, one in _with_single_entries(config, "output"):
        with model.report_to(f"{path}.label_filename"):
            read_labels(model.directory, one)
    for path, one in _with_single_entries(config, "model_repository_agents.agents"):
        with model.report_to(path):
            run_agents(one, model.directory, _OPTIONS.repoagent_directory)
    if is_ensemble(config):
        return
    model.problems += find_copies(model.directory)
    with model.report_to("parameters"):
        check_environment(config, model.directory)
    with model.report_to("sequence_batching.state"):
        read_states(config, model.directory)
    sound = not any(problem.field.startswith(("input", "output")) for problem in model.problems)
    for path, one in (
        _with_single_entries(config, "model_warmup") if model.complete and sound else ()
    ):
        with model.report_to(path):
            Warmup(one, model.directory, Signature(one))


def _check_openai(model: CheckedModel, config: ModelConfig) -> None:
    """Checks the `OPENAI` parameters; against the tensors only if these are known."""
    findings = list(check_defaults(config))
    if model.complete and not findings:
        version = max(model.versions, default=1)
        template = read_chat_template(model.directory, version, config)
        contract = compile_contract(config, template)
        findings += check_contract(contract, config, template)
        if fault := asyncio.run(find_template_fault(contract, template)):
            findings.append(Finding(fault, "parameters[OPENAI_CHAT_TEMPLATE]"))
        findings += check_adapters(model.directory, version, config)
        findings += check_tokenizer(contract, model.directory, version, config)
    for one in findings:
        model.add(one.text, one.field, one.advice)


def _with_single_entries(config: ModelConfig, path: str) -> Iterator[tuple[str, ModelConfig]]:
    """Yields a copy of the configuration for each entry of a list, with only this entry in it."""
    for index, _ in enumerate(reduce(getattr, path.split("."), config)):
        one = new_config()
        one.CopyFrom(config)
        entries = reduce(getattr, path.split("."), one)
        del entries[index + 1 :], entries[:index]
        yield f"{path}[{index}]", one


def _first_part(path: str) -> str:
    """The first part of a field path: a field, or an element of a list."""
    found = _FIRST_PART.match(path)
    return found[0] if found else ""


class _Warnings(logging.Handler):
    """A log handler that reports warnings of the loader as warnings about the model."""

    def __init__(self, model: CheckedModel) -> None:
        super().__init__(logging.WARNING)
        self._model = model

    def emit(self, record: logging.LogRecord) -> None:
        self._model.add(record.getMessage(), warning=True)


def check_ensembles(models: Mapping[str, CheckedModel]) -> None:
    """Adds to the problems of each ensemble what it and its members have between them."""
    known = DependencyGraph(Registry())
    ensembles = {
        name: model.config
        for name, model in models.items()
        if model.config is not None and is_ensemble(model.config)
    }
    for name, config in ensembles.items():
        steps = config.ensemble_scheduling.step
        known.record_model(name, config, {step.model_name: step.model_name for step in steps})
    for name, config in ensembles.items():
        last = known.find_cycle_end(name)
        if last:
            models[name].add(
                circular_dependency_error(name, last).message, "ensemble_scheduling.step"
            )
        for finding in _check(name, config, models):
            models[name].add(finding.text, finding.field, finding.advice)


def _check(name: str, config: ModelConfig, models: Mapping[str, CheckedModel]) -> Iterator[Finding]:
    members: list[ModelConfig | None] = []
    for index, step in enumerate(config.ensemble_scheduling.step):
        path = f"ensemble_scheduling.step[{index}]"
        member = models.get(step.model_name)
        if member is None:
            if step.model_name:  # an empty name is reported elsewhere
                near = closest_choice(step.model_name, models)
                yield Finding(
                    models_unavailable_error(name, [step.model_name]).message,
                    f"{path}.model_name",
                    advice=f"did you mean '{near}'?" if near else "",
                )
        elif member.versions and step.model_version not in (-1, *member.versions):
            unset = "" if step.model_version else "the default is 0; "
            served = ", ".join(map(str, member.versions))
            yield Finding(
                version_not_loaded_error(name, member.name, step.model_version).message,
                f"{path}.model_version",
                advice=f"{unset}-1 selects the latest version; available versions: {served}",
            )
        members.append(member.config if member is not None and member.complete else None)
    misfits = list(iterate_misfits(config, members))
    yield from misfits
    known = [member for member in members if member is not None]
    if not misfits and len(known) == len(members):
        try:
            check_step_models(config, known)
        except HostError as error:
            yield Finding(error.message, "ensemble_scheduling.step")
