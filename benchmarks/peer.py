"""Installs and starts the peer: Triton 2.51 with its Python backend, and perf_analyzer, from PyPI.

Everything is installed into one scratch folder; only Python is needed.
"""

from __future__ import annotations

import filecmp
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

SERVER = "nvidia-pytriton==0.7.0"  # this wheel contains the server for CPU and GPU
LOAD_GENERATOR = "tritonclient==2.48.0"  # the last wheels that contain perf_analyzer

CACHE = "local,size=16777216"
"""The response cache, for both servers."""


class Peer:
    """A Triton installation in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "venv" / "bin" / "python"
        self.perf_analyzer = folder / "perf" / "perf_analyzer"

    def install(self) -> None:
        """Installs the missing packages. Raises CalledProcessError if pip fails."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.python.exists():
            venv.create(self.folder / "venv", with_pip=True)
        try:
            self._run("-c", "import pytriton")
        except subprocess.CalledProcessError:
            self._run("-m", "pip", "install", "-q", SERVER, "tritonclient[grpc]")
        if not self.perf_analyzer.exists():
            self._fetch_perf_analyzer()
        self._arrange()

    def _run(self, *arguments: str) -> str:
        done = subprocess.run(
            [str(self.python), *arguments], check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    def _site(self) -> Path:
        return Path(self._run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))"))

    def _bundle(self) -> Path:
        return self._site() / "pytriton" / "tritonserver"

    def _fetch_perf_analyzer(self) -> None:
        target = self.perf_analyzer.parent
        target.mkdir(exist_ok=True)
        self._run(
            *("-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"),
            *("--platform", "manylinux1_x86_64", "-d", str(target), LOAD_GENERATOR),
        )
        wheel = next(target.glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith("/perf_analyzer"))
            self.perf_analyzer.write_bytes(archive.read(member))
        wheel.unlink()
        self.perf_analyzer.chmod(0o755)

    def _arrange(self) -> None:
        """Copies libraries, backend and stub to the places where the server searches for them."""
        site = self._site()
        bundle = self._bundle()
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        libraries = self.folder / "libs"
        libraries.mkdir(exist_ok=True)
        for pattern, name in {"libb64-*": "libb64.so.0d", "libcudart-*": "libcudart.so.12"}.items():
            source = next((site / "nvidia_pytriton.libs").glob(pattern))
            if not (libraries / name).exists():
                shutil.copy(source, libraries / name)
        backend = self.folder / "backends" / "python"
        if not backend.exists():
            shutil.copytree(bundle / "backends" / "python", backend)
        stub = backend / "triton_python_backend_stub"
        source = bundle / "python_backend_stubs" / version / stub.name
        # A running executable cannot be overwritten.
        if not (stub.exists() and filecmp.cmp(source, stub, shallow=False)):
            shutil.copy(source, stub)
        stub.chmod(0o755)
        (bundle / "bin" / "tritonserver").chmod(0o755)

    def command(self, repository: Path, grpc_port: int, http_port: int) -> list[str]:
        """The command that starts the server with a model repository."""
        return [
            str(self._bundle() / "bin" / "tritonserver"),
            f"--model-repository={repository}",
            f"--backend-directory={self.folder / 'backends'}",
            f"--cache-directory={self._bundle() / 'caches'}",
            f"--cache-config={CACHE}",
            f"--grpc-port={grpc_port}",
            f"--http-port={http_port}",
            "--http-address=127.0.0.1",
            "--allow-metrics=false",
        ]

    def environment(self) -> dict[str, str]:
        """The environment variables by which the server and its stubs find libraries and numpy."""
        site = self._site()
        libraries = self._run("-c", "import sysconfig; print(sysconfig.get_config_var('LIBDIR'))")
        return {
            **os.environ,
            "PATH": f"{self.python.parent}:{os.environ['PATH']}",
            "VIRTUAL_ENV": str(self.folder / "venv"),
            "PYTHONPATH": str(site),
            "LD_LIBRARY_PATH": f"{site / 'nvidia_pytriton.libs'}:{libraries}",
        }
