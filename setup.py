"""Put config/, checkpoints/, docs/ and the example of `hocket new` into the wheel; all else is in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SHIPPED = ("config", "checkpoints", "docs", "examples/own_everything")  # hocket.common.files.shipped finds them


class BuildWithShippedFiles(build_py):
    """Copy the folders that ship with hocket to hocket/shipped."""

    def run(self) -> None:
        """Build the package."""
        super().run()
        if self.editable_mode:  # hocket finds them in the checkout
            return
        for folder in SHIPPED:
            target = Path(self.build_lib, "hocket", "shipped", folder)
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(folder, target, ignore=shutil.ignore_patterns("__pycache__"))


setup(cmdclass={"build_py": BuildWithShippedFiles})
