"""The description on PyPI: the README, with links that lead to the repository."""

import re
from pathlib import Path

from setuptools import setup

_PAGES = "https://github.com/pbhost/pbhost/blob/main/"

readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")

setup(
    long_description=re.sub(r"\]\((?!https?://|#)", f"]({_PAGES}", readme),
    long_description_content_type="text/markdown",
)
