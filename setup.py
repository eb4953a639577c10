"""Puts the recipes and their configuration, which the repository has at its top level, into the wheel's package."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class WithRecipes(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for folder in ("recipes", "conf"):
                to = Path(self.build_lib, "lightning_shard", folder)
                shutil.copytree(folder, to, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))


setup(cmdclass={"build_py": WithRecipes})
