"""Links and pictures in the description on PyPI, and the optional extension."""

import glob
import os
import re
import runpy
from pathlib import Path

from setuptools import Extension, setup

_PAGES = "https://github.com/pbhost/pbhost/blob/main/"
_FILES = "https://raw.githubusercontent.com/pbhost/pbhost/main/"

readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
readme = re.sub(r"(!\[[^\]]*\]\()(?!https?://)", rf"\1{_FILES}", readme)

digest = runpy.run_path("host/lane/sources.py")["digest"]

# Left out without a compiler; with PBHOST_LANE=0, the wheel is for every platform.
lane = Extension(
    "host.lane._lane",
    ["host/lane/_lane.pyx"],
    depends=glob.glob("host/lane/*.pxi"),
    define_macros=[("LANE_SOURCES", f'"{digest()}"')],
    optional=True,
)

setup(
    long_description=re.sub(r"\]\((?!https?://|#)", f"]({_PAGES}", readme),
    long_description_content_type="text/markdown",
    ext_modules=[] if os.environ.get("PBHOST_LANE") == "0" else [lane],
)
