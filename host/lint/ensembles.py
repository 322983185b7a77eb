"""Checks the ensembles of a repository against the models of their steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from host.config.findings import Finding
from host.config.schema import ModelConfig, closest_choice, is_ensemble
from host.ensembles.compatibility import check_step_models, iterate_misfits
from host.errors import HostError
from host.lint.model_folder import CheckedModel
from host.model_control.dependencies import (
    DependencyGraph,
    circular_dependency_error,
    models_unavailable_error,
    version_not_loaded_error,
)
from host.models.registry import Registry


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
