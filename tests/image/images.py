"""Images built with buildah from this checkout, on a base of Debian's packages."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.conftest import ROOT

_CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
_BUILD_SECONDS = 1200.0
_HOOKS = "/usr/share/mmdebstrap/hooks/merged-usr"  # without it, usrmerge brings Perl: 50 MB
_LEFT_OUT = ("share/man", "share/doc", "share/locale", "share/i18n", "lib/*/gconv")
_PACKAGES = ("usr-is-merged", "python3", "python3-venv", "ca-certificates", "libstdc++6")


class ImageStore:
    """A folder of images, apart from those of the user."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running = Path(tempfile.mkdtemp(prefix="run-"))  # podman wants a short path
        self._options = [
            *("--storage-driver=vfs", f"--root={folder}/root"),
            f"--runroot={self._running}",
        ]

    def build_base(self) -> None:
        """Builds the image `base`: Debian's essential packages, and Python with venv."""
        context = self._folder / "base"
        context.mkdir(parents=True)
        run_program(
            "mmdebstrap",
            "--variant=essential",
            f"--hook-dir={_HOOKS}",
            f"--include={','.join(_PACKAGES)}",
            '--aptopt=APT::Install-Recommends "false"',
            *(f"--dpkgopt=path-exclude=/usr/{name}/*" for name in _LEFT_OUT),
            platform.freedesktop_os_release()["VERSION_CODENAME"],  # what this machine can get
            str(context / "base.tar"),
        )
        (context / "Containerfile").write_text("FROM scratch\nADD base.tar /\n")
        self._buildah("build", "--isolation=chroot", "--tag=base", str(context))
        (context / "base.tar").unlink()

    def build(
        self, tag: str, extras: str = "", wheel: Path | None = None, program: str = "buildah"
    ) -> None:
        """Builds the image of this checkout, with the certificates of this machine.

        `wheel`: a file that comes before what the index has of that package. `program`: buildah or
        podman.
        """
        secret = self._folder / "pip.conf"
        settings = f"[global]\ncert = {_CERTIFICATES}\ntimeout = 180\n"
        volumes = [f"--volume={_CERTIFICATES}:{_CERTIFICATES}:ro"]
        if wheel is not None:
            name, version = wheel.name.split("-")[:2]
            folder = self._folder / "wheels"
            folder.mkdir()
            shutil.copy(wheel, folder)
            (folder / "constraints.txt").write_text(f"{name}=={version}\n")
            settings += "find-links = /wheels\nconstraint = /wheels/constraints.txt\n"
            volumes.append(f"--volume={folder}:/wheels:ro")
        secret.write_text(settings)
        run_program(
            program,
            *self._options,
            "build",
            "--isolation=chroot",
            "--layers=false",
            "--pull=never",
            *volumes,
            f"--secret=id=pip,src={secret}",
            "--build-arg=BASE=localhost/base",
            f"--build-arg=EXTRAS={extras}",
            f"--file={ROOT}/Containerfile",
            f"--tag={tag}",
            str(ROOT),
        )

    def size(self, tag: str) -> float:
        """The size of an image with its base, in MB, uncompressed."""
        (listed,) = json.loads(self._buildah("images", "--json", f"localhost/{tag}"))
        number, unit = listed["size"].split()
        return float(number) * {"KB": 1e-3, "MB": 1, "GB": 1e3}[unit.upper()]

    @contextmanager
    def mounted(self, tag: str) -> Iterator[Path]:
        """The root file system of a container of an image."""
        name = self._buildah("from", "--pull-never", f"localhost/{tag}")
        try:
            yield Path(self._buildah("mount", name))
        finally:
            self._buildah("rm", name)

    def configuration(self, tag: str) -> Any:
        """The configuration of an image: `User`, `Env`, `Cmd` and others."""
        inspected = json.loads(self._buildah("inspect", "--type=image", f"localhost/{tag}"))
        return inspected["OCIv1"]["config"]

    def remove(self) -> None:
        """Removes all images."""
        shutil.rmtree(self._folder)
        shutil.rmtree(self._running)

    def _buildah(self, *arguments: str) -> str:
        return run_program("buildah", *self._options, *arguments)


def run_program(*command: str) -> str:
    """Runs a program; returns what it prints. Raises RuntimeError with its errors."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_SECONDS)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return done.stdout.strip()
