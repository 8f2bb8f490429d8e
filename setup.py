"""Which folders are which packages of the wheel: what is not named `espalier…` in the repository is in the wheel.

Everything else is in pyproject.toml.
"""

from setuptools import find_namespace_packages, setup

SAME = ("espalier", "espalier_client", "espalier_cli")
RENAMED = {"espalier_service": "service", "espalier_training": "training", "espalier_loadtest": "loadtest"}
NOT = ("*__compiled__*", "*__pycache__*")

folders = {name: name for name in SAME} | RENAMED
packages = [*folders]
for name, folder in folders.items():
    packages += [f"{name}.{package}" for package in find_namespace_packages(folder, exclude=NOT)]

setup(packages=packages, package_dir=RENAMED)
