"""What pyproject.toml cannot say: a wheel holds the folder verify as flash_attn_compat.verify.

An editable install does not: the command line finds the folder beside the package.
"""

from setuptools import setup
from setuptools.command.build_py import build_py

VERIFY = "flash_attn_compat.verify"


class BuildWithVerify(build_py):
    def finalize_options(self) -> None:
        super().finalize_options()
        self.packages = [*self.packages, VERIFY]
        self.package_dir = {**self.package_dir, VERIFY: "verify"}


setup(cmdclass={"build_py": BuildWithVerify})
