"""The image of Containerfile, built and run by `make test-image`, which takes minutes."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.clients import infer_error, tensor
from tests.conftest import RepositoryBuilder, wait_until
from tests.image.containers import running
from tests.image.images import ImageStore

PROGRAMS = ("buildah", "mmdebstrap", "runc")
MISSING = [name for name in PROGRAMS if shutil.which(name) is None]
pytestmark = [
    pytest.mark.skipif("PBHOST_TEST_IMAGE" not in os.environ, reason="make test-image runs these"),
    pytest.mark.skipif(bool(MISSING), reason=f"these programs are missing: {', '.join(MISSING)}"),
    pytest.mark.skipif(os.getuid() != 0, reason="only root can build and run images in this way"),
]
TRITON = ["tritonserver", "--model-repository=/models"]
"""The command of a manifest for Triton."""
MEMORY = 600 << 20  # bytes
MAX_SIZE, MAX_ONNX_SIZE = 250.0, 120.0  # MB

ORPHANS = """
import subprocess
import triton_python_backend_utils as pb_utils

DAEMONS = "for _ in 1 2 3 4 5; do setsid sh -c 'echo orphan $$' & done"

class TritonPythonModel:
    def execute(self, requests):
        subprocess.run(["sh", "-c", DAEMONS], check=True)
        return [pb_utils.InferenceResponse([]) for _ in requests]
"""


SUMS = """
backend: "pytorch"
input [{name: "a", data_type: TYPE_FP32, dims: [3]}, {name: "b", data_type: TYPE_FP32, dims: [3]}]
output [{name: "S", data_type: TYPE_FP32, dims: [3]}, {name: "D", data_type: TYPE_FP32, dims: [3]}]
"""


@dataclass
class Image:
    """An image that is mounted at `root`."""

    root: Path
    configuration: Any


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ImageStore]:
    """Images on a small base of Debian, removed after the tests."""
    store = ImageStore(tmp_path_factory.mktemp("images"))
    store.build_base()
    store.build("pbhost")
    yield store
    store.remove()


@pytest.fixture(scope="module")
def image(store: ImageStore) -> Iterator[Image]:
    """The image without extras."""
    with store.mounted("pbhost") as root:
        yield Image(root, store.configuration("pbhost"))


def test_the_image_is_small(store: ImageStore, capsys: pytest.CaptureFixture[str]) -> None:
    store.build("pbhost-onnx", "onnx")
    size, base = store.size("pbhost"), store.size("base")
    onnx = store.size("pbhost-onnx") - size
    with capsys.disabled():
        print(f"\nimage: {size:.0f} MB, of which {base:.0f} MB base; ONNX: {onnx:.0f} MB more")
    assert size <= MAX_SIZE
    assert onnx <= MAX_ONNX_SIZE
    with store.mounted("pbhost-onnx") as root:
        assert list(root.glob("opt/pbhost/lib/python3*/site-packages/onnxruntime"))


def test_podman_builds_the_same_image(store: ImageStore, image: Image) -> None:
    if shutil.which("podman") is None:
        pytest.skip("podman is not installed")
    store.build("pbhost-podman", program="podman")
    assert store.configuration("pbhost-podman") == image.configuration
    with store.mounted("pbhost-podman") as root:
        assert (root / "opt/tritonserver/bin/tritonserver").is_file()


def test_an_image_with_torch_serves_torchscript(
    store: ImageStore, repository: RepositoryBuilder, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    wheels = Path(os.environ.get("PIP_FIND_LINKS", "/nowhere"))
    wheel = next(wheels.glob(f"torch-{torch.__version__}-*.whl"), None)
    if wheel is None:
        pytest.skip("PIP_FIND_LINKS has no torch for the CPU; that of PyPI has gigabytes for GPUs")
    from tests.torch_models import SumDiff, script

    script(repository.add("sums", config=SUMS), SumDiff())
    store.build("pbhost-torch", "torch", wheel)
    print(f"PyTorch: {store.size('pbhost-torch') - store.size('pbhost'):.0f} MB more")
    array = np.arange(3, dtype=np.float32)
    configuration = store.configuration("pbhost-torch")
    with (
        store.mounted("pbhost-torch") as root,
        running(tmp_path / "run", root, configuration, TRITON, repository.path) as container,
        container.client() as client,
    ):
        result = client.infer("sums", [tensor("a", array), tensor("b", array)])
        np.testing.assert_array_equal(result.as_numpy("S"), array + array)
        assert container.stop() == 0, container.output


def test_only_the_name_of_the_image_changes_in_a_manifest_for_triton(
    image: Image, repository: RepositoryBuilder, tmp_path: Path
) -> None:
    """As user 1000, without rights, on a read-only root, with 64 KiB of /dev/shm."""
    assert image.configuration["User"] == "1000:1000"
    assert image.configuration["Cmd"] == TRITON
    assert "Entrypoint" not in image.configuration
    repository.copy("identity")
    array = np.arange(1 << 20, dtype=np.float32)
    with running(
        tmp_path / "run", image.root, image.configuration, TRITON, repository.path
    ) as container:
        with container.client() as client:
            result = client.infer("identity", [tensor("INPUT0", array)])
            np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), array)
        assert container.init_process().uids().real == 1000
        assert container.stop() == 0, container.output


def test_orphans_are_reaped(image: Image, repository: RepositoryBuilder, tmp_path: Path) -> None:
    repository.add("orphans", ORPHANS)
    with running(
        tmp_path / "run", image.root, image.configuration, TRITON, repository.path
    ) as container:
        with container.client() as client:
            client.infer("orphans", [])
        wait_until(lambda: container.output.count("orphan ") == 5, "the daemons to run")
        first = container.init_process()
        wait_until(lambda: len(first.children()) == 1, "the orphans to be reaped")
        first.children()[0].send_signal(signal.SIGKILL)
        assert container.stop() == 128 + signal.SIGKILL


def test_a_request_that_is_too_large_for_the_container_is_refused(
    image: Image, repository: RepositoryBuilder, tmp_path: Path
) -> None:
    repository.copy("identity")
    with running(
        tmp_path / "run", image.root, image.configuration, TRITON, repository.path, MEMORY
    ) as container:
        with container.client() as client:
            array = np.zeros(256 << 18, np.float32)
            text = infer_error(client.infer, "identity", [tensor("INPUT0", array)])[1]
            assert "Not enough memory to receive the request" in text
            array = np.zeros(100 << 18, np.float32)
            result = client.infer("identity", [tensor("INPUT0", array)])
            assert len(result.as_numpy("OUTPUT0")) == len(array)
        assert container.stop() == 0, container.output
