"""The version of the installed distribution; pyproject.toml is the one place that states it."""

from importlib.metadata import version

__version__ = version("torch_gdn")
