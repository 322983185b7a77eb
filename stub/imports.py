"""Lists the files that a model has imported, apart from installed packages."""

import os
import site
import sys
from typing import List, Optional, Set, Tuple

from stub.wire.paths import absolute_path

_MAX_FILES = 10_000
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_OWN = tuple(
    os.path.join(_HERE, name) + os.sep
    for name in (
        "host",
        "stub",
        "pb_utils",
        "triton_python_backend_utils",
        "c_python_backend_utils",
    )
)
_PACKAGES = tuple(os.sep + name + os.sep for name in ("site-packages", "dist-packages"))


def list_imported_files(
    started: int, error: Optional[BaseException] = None
) -> List[Tuple[str, int, int]]:
    """Returns the files of the user's modules, as `ImportedFiles` describes them.

    `started` is the time when the process started, in nanoseconds since 1970. With `error`, an
    exception of an import, the files in its traceback are there too: a module that fails is not in
    `sys.modules`.
    """
    found = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    seen: Set[int] = set()  # an error may be its own cause
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        trace = error.__traceback__
        while trace is not None:
            found.add(trace.tb_frame.f_code.co_filename)
            trace = trace.tb_next
        if isinstance(error, SyntaxError):
            found.add(error.filename)  # no frame has it
        error = error.__cause__
    paths = (
        os.path.normpath(absolute_path(path))
        for path in found
        if isinstance(path, str) and "<" not in path
    )
    user = sorted(path for path in paths if _is_of_user(path))
    return [_describe_file(path, started) for path in user[:_MAX_FILES]]


def _describe_file(path: str, started: int) -> Tuple[str, int, int]:
    try:
        status = os.stat(path)
    except OSError:
        return path, 0, 0
    changed = max(status.st_mtime_ns, status.st_ctime_ns)
    return (path, changed, status.st_size) if changed <= started else (path, 0, 0)


def _is_of_user(path: str) -> bool:
    library = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
    user_site = (site.USER_SITE or library) + os.sep
    if path.startswith((library, user_site, *_OWN)):
        return False
    return not any(part in path for part in _PACKAGES)
