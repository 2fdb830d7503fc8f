"""Reads the version of the installed distribution, which pyproject.toml states."""

from importlib.metadata import version

__version__ = version("torch_gdn")
