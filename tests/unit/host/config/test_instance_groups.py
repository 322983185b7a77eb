"""Instance groups: their defaults, checks and instances."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from host.config.findings import Finding
from host.config.instance_groups import (
    InstanceSpec,
    check_instance_groups,
    instance_specs,
    normalise_instance_groups,
)
from host.config.json_form import to_dict
from host.config.pbtxt import parse_pbtxt
from host.config.schema import ModelConfig
from host.errors import ErrorCode


def groups(text: str, gpus: Sequence[int] = ()) -> ModelConfig:
    config = parse_pbtxt(f'name: "m" {text}', "config.pbtxt")
    normalise_instance_groups(config, gpus)
    return config


def finding(text: str, gpus: Sequence[int] = ()) -> Finding:
    return next(check_instance_groups(groups(text, gpus), gpus))


def names(text: str, gpus: Sequence[int] = ()) -> list[str]:
    return [spec.name for spec in instance_specs(groups(text, gpus))]


def test_a_model_without_groups_gets_one_with_the_models_name() -> None:
    assert instance_specs(groups("")) == [InstanceSpec("m_0", "CPU", 0, 0)]


def test_groups_without_names_and_instances_are_numbered() -> None:
    assert names("instance_group { count: 2 } instance_group {}") == ["m_0_0", "m_0_1", "m_1_0"]
    assert names('instance_group { name: "g" count: 2 }') == ["g_0", "g_1"]


def test_a_count_below_one_means_the_default() -> None:
    assert names("instance_group { count: 0 } instance_group { count: -1 }") == ["m_0_0", "m_1_0"]


@pytest.mark.parametrize("backend", ["tensorflow", "onnxruntime"])
def test_some_backends_default_to_two_cpu_instances(backend: str) -> None:
    assert groups(f'backend: "{backend}"').instance_group[0].count == 2
    assert groups(f'backend: "{backend}"', gpus=[0]).instance_group[0].count == 1


def test_kind_auto_becomes_gpu_only_if_all_its_gpus_are_usable() -> None:
    text = "instance_group { gpus: 1 } instance_group {} instance_group { gpus: 7 }"
    kinds = [group["kind"] for group in to_dict(groups(text, gpus=[0, 1]))["instance_group"]]
    assert kinds == ["KIND_GPU", "KIND_GPU", "KIND_CPU"]
    kinds = [group["kind"] for group in to_dict(groups(text))["instance_group"]]
    assert kinds == ["KIND_CPU"] * 3


def test_gpus_of_a_group_share_the_names_of_its_instances() -> None:
    specs = instance_specs(groups("instance_group { count: 2 }", gpus=[0, 2]))
    assert [(spec.name, spec.kind, spec.device_id) for spec in specs] == [
        ("m_0_0", "GPU", 0),
        ("m_0_0", "GPU", 2),
        ("m_0_1", "GPU", 0),
        ("m_0_1", "GPU", 2),
    ]


def test_kind_model_and_passive_are_in_the_instance_specs() -> None:
    specs = instance_specs(
        groups("instance_group {} instance_group { kind: KIND_MODEL passive: true }")
    )
    assert specs[1] == InstanceSpec("m_1_0", "MODEL", 0, 1, passive=True)


def test_an_ensemble_has_no_groups() -> None:
    config = groups('platform: "ensemble" ensemble_scheduling {}')
    assert not config.instance_group
    assert list(check_instance_groups(config)) == []
    assert instance_specs(config) == []


@pytest.mark.parametrize(
    ("text", "gpus", "expected", "field"),
    [
        (
            "kind: KIND_CPU gpus: 0",
            [0],
            "instance group m_0 of model m has kind KIND_CPU but specifies one or more GPUs",
            "gpus",
        ),
        (
            "gpus: 0",
            [],
            "instance group m_0 of model m has kind KIND_CPU but specifies one or more GPUs",
            "gpus",
        ),
        (
            "kind: KIND_MODEL gpus: 0",
            [],
            "instance group m_0 of model m has kind KIND_MODEL but specifies one or more GPUs",
            "gpus",
        ),
        (
            "kind: KIND_GPU",
            [],
            "instance group m_0 of model m has kind KIND_GPU but server does not support GPUs",
            "kind",
        ),
        (
            "kind: KIND_GPU gpus: 42",
            [],
            (
                "instance group m_0 of model m specifies invalid or unsupported gpu id 42. GPUs "
                "with at least the minimum required CUDA compute compatibility of 6.000000 "
                "are: "
            ),
            "gpus[0]",
        ),
        (
            "kind: KIND_GPU gpus: [0, 5]",
            [0, 1],
            (
                "instance group m_0 of model m specifies invalid or unsupported gpu id 5. GPUs "
                "with at least the minimum required CUDA compute compatibility of 6.000000 "
                "are: 0, 1"
            ),
            "gpus[1]",
        ),
        (
            'profile: "1"',
            [],
            (
                "instance group m_0 of model m and platform specifies profile field which is only "
                "supported for TensorRT models"
            ),
            "profile",
        ),
    ],
)
def test_an_invalid_group_is_reported(
    text: str, gpus: list[int], expected: str, field: str
) -> None:
    found = finding(f"instance_group {{ {text} }}", gpus)
    assert found == Finding(expected, f"instance_group[0].{field}", advice=found.advice)


def test_the_error_names_the_minimum_compute_capability() -> None:
    config = groups("instance_group { kind: KIND_GPU gpus: 5 }", [0])
    found = next(check_instance_groups(config, [0], 7.5))
    assert "CUDA compute compatibility of 7.500000 are: 0" in found.text


@pytest.mark.parametrize("profile", ["-1", "x", ""])
def test_a_profile_must_be_a_number(profile: str) -> None:
    found = finding(f'platform: "tensorrt_plan" instance_group {{ profile: ["0", "{profile}"] }}')
    assert found.text == (
        "instance group m_0 of model m and platform tensorrt_plan specifies invalid profile "
        f"{profile}. The field should contain the string representation of a non-negative integer."
    )


def test_the_error_about_profiles_lacks_a_space_as_in_triton() -> None:
    found = finding('platform: "p" instance_group { profile: "1" }')
    assert found.text == (
        "instance group m_0 of model m and platform pspecifies profile field which is only "
        "supported for TensorRT models"
    )


def test_groups_that_are_not_normalised_are_reported() -> None:
    config = parse_pbtxt('name: "m"', "c")
    assert next(check_instance_groups(config)).text == (
        "must specify one or more 'instance group's for m"
    )
    config = parse_pbtxt('name: "m" instance_group { name: "g" }', "c")
    found = next(check_instance_groups(config))
    assert found.text == "instance group g of model m has unexpected kind KIND_AUTO"
    assert found.code is ErrorCode.INTERNAL
