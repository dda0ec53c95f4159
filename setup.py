"""What pyproject.toml cannot say: the packages that are found, and conf/ as one more, ``ptdbench.conf``."""

from setuptools import find_packages, setup

setup(packages=[*find_packages(include=["ptdbench*"]), "ptdbench.conf"])
