"""Builds the C library of the crate into the package. The library knows nothing of Python, so one wheel serves every Python 3."""

import os
import pathlib
import shutil
import subprocess
import sys

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

CRATE = pathlib.Path(__file__).resolve().parents[2]
NAME = "libturbomoq_c.dylib" if sys.platform == "darwin" else "libturbomoq_c.so"


class Build(build_py):
    """The package with the library beside its modules."""

    def run(self) -> None:
        super().run()
        manifest = CRATE / "mlx/capi/Cargo.toml"
        if not manifest.exists():
            raise SystemExit(f"{manifest} is missing: install from a clone of the repository, as in `pip install ./mlx/python`")
        if shutil.which("cargo") is None:
            raise SystemExit("cargo is missing: the package builds its library from Rust (https://rustup.rs)")
        subprocess.run(["cargo", "build", "--release", "--locked", "-p", "turbomoq-c"], cwd=CRATE, check=True)
        built = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", CRATE / "target")) / "release" / NAME
        shutil.copyfile(built, self._place())

    def _place(self) -> pathlib.Path:
        folder = CRATE / "mlx/python" if self.editable_mode else pathlib.Path(self.build_lib)
        return folder / "turbomoq_mlx" / NAME

    def get_outputs(self, *arguments) -> list:
        return [*super().get_outputs(*arguments), str(self._place())]


class Wheel(bdist_wheel):
    """A wheel for any Python 3 of one platform."""

    def get_tag(self) -> tuple:
        return "py3", "none", super().get_tag()[2]


class Binary(Distribution):
    def has_ext_modules(self) -> bool:
        return True


setup(cmdclass={"build_py": Build, "bdist_wheel": Wheel}, distclass=Binary)
