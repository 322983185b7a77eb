"""The page about every field of a configuration, compared with the fields that there are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from host.config.model_config import finish, load
from host.config.pbtxt import parse
from host.config.schema import new_config
from host.errors import HostError
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "configuration.md").read_text()
ROW = r"^\| (`[^|]*`) \| (?:(honoured|refused|without effect) )?\| ([^\n]*) \|$"
ROWS = re.findall(ROW, PAGE, re.MULTILINE)
FATES = {name: fate for names, fate, _ in ROWS for name in re.findall(r"`([\w.]+)`", names)}


def fields(message: Any, path: str = "", above: tuple[str, ...] = ()) -> Iterator[str]:
    """The paths of all fields; a message that is used in several places counts in the first."""
    for field in message.fields:
        name = f"{path}{field.name}"
        yield name
        inner = field.message_type
        if inner is not None and inner.GetOptions().map_entry:
            inner = inner.fields_by_name["value"].message_type
        if inner is None or inner.full_name in above:
            continue
        yield from fields(inner, f"{name}.", (*above, inner.full_name))


SAME = {
    "dynamic_batching.priority_queue_policy.": "dynamic_batching.default_queue_policy.",
    "optimization.cuda.graph_spec.graph_lower_bound.input.": "optimization.cuda.graph_spec.input.",
    "optimization.execution_accelerators.cpu_execution_accelerator.": (
        "optimization.execution_accelerators.gpu_execution_accelerator."
    ),
}
"""Places of one message: the page has its fields once."""


def documented(name: str) -> str:
    for place, first in SAME.items():
        name = name.replace(place, first) if name.startswith(place) else name
    return name


FIELDS = list(fields(new_config().DESCRIPTOR))


def test_the_page_names_every_field_and_no_other() -> None:
    assert {documented(name) for name in FIELDS} == set(FATES)


def test_a_field_is_named_once() -> None:
    named = [name for names, _, _ in ROWS for name in re.findall(r"`([\w.]+)`", names)]
    assert len(named) == len(set(named))


def test_what_is_not_honoured_has_a_reason() -> None:
    assert all(reason.strip() for _, fate, reason in ROWS if fate != "honoured")


def read(tmp_path: Path, text: str) -> Any:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.py").touch()
    (tmp_path / "m" / "config.pbtxt").write_text(f'backend: "python" {text}')
    return finish(load(tmp_path / "m", strict=False))


REFUSED = {
    "input.is_shape_tensor": (
        'input { name: "a" data_type: TYPE_BOOL dims: 1 is_shape_tensor: true }'
    ),
    "input.is_non_linear_format_io": (
        'input { name: "a" data_type: TYPE_BOOL dims: [1, 1, 1] is_non_linear_format_io: true }'
    ),
    "output.is_shape_tensor": (
        'output { name: "a" data_type: TYPE_BOOL dims: 1 is_shape_tensor: true }'
    ),
    "output.is_non_linear_format_io": (
        'output { name: "a" data_type: TYPE_BOOL dims: [1, 1, 1] is_non_linear_format_io: true }'
    ),
    "instance_group.profile": 'instance_group { profile: "1" }',
}


def test_there_is_a_sample_of_everything_that_is_refused() -> None:
    refused = [
        n
        for n, fate, why in ROWS
        if fate == "refused" or "refused for anything else" in why and "tensorrt" in why
    ]
    assert set(REFUSED) == set(re.findall(r"`([\w.]+)`", " ".join(refused)))


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(HostError):
        read(tmp_path, REFUSED[name])


WITHOUT_EFFECT = """
cc_model_filenames { key: "9.0" value: "x.py" }
model_operations { op_library_filename: "x.so" }
input { name: "a" data_type: TYPE_BOOL dims: [1, 1, 1] format: FORMAT_NCHW }
instance_group {
  host_policy: "p"
  secondary_devices { kind: KIND_NVDLA device_id: 1 }
}
optimization {
  graph { level: 1 }
  priority: PRIORITY_MAX
  cuda {
    graphs: true
    busy_wait_events: true
    output_copy_stream: true
    graph_spec {
      batch_size: 1
      input { key: "a" value { dim: 1 } }
      graph_lower_bound { batch_size: 1 input { key: "a" value { dim: 1 } } }
    }
  }
  execution_accelerators {
    gpu_execution_accelerator { name: "x" parameters { key: "a" value: "b" } }
    cpu_execution_accelerator { name: "y" }
  }
  input_pinned_memory { enable: false }
  output_pinned_memory { enable: false }
  gather_kernel_buffer_threshold: 1
  eager_batching: true
}
"""


def test_what_is_without_effect_is_accepted_and_shown(tmp_path: Path) -> None:
    asked = parse(WITHOUT_EFFECT, "config.pbtxt")
    shown = read(tmp_path, WITHOUT_EFFECT)
    for name in ("cc_model_filenames", "model_operations", "input", "optimization"):
        assert getattr(shown, name) == getattr(asked, name)
    group = shown.instance_group[0]
    assert group.host_policy == "p"
    assert list(group.secondary_devices) == list(asked.instance_group[0].secondary_devices)


def given(message: Any, path: str = "") -> Iterator[str]:
    """The paths of all fields that are set."""
    for field, value in message.ListFields():
        name = f"{path}{field.name}"
        yield name
        inner = field.message_type
        if inner is not None and inner.GetOptions().map_entry:
            if inner.fields_by_name["value"].message_type is not None:
                for entry in value.values():
                    yield from given(entry, f"{name}.")
        elif inner is not None:
            several = not hasattr(value, "ListFields")
            for part in value if several else [value]:
                yield from given(part, f"{name}.")


def test_the_sample_has_everything_that_is_without_effect() -> None:
    asked = {documented(name) for name in given(parse(WITHOUT_EFFECT, "config.pbtxt"))}
    idle = {name for name, fate in FATES.items() if fate == "without effect"}
    # Their only values are defaults, which are not among what is set.
    unseen = {name for name in idle if name.endswith(".enable")}
    unseen.add("instance_group.secondary_devices.kind")
    unseen.add("ensemble_scheduling.step.model_namespace")  # the sample is no ensemble
    assert idle - unseen <= asked
