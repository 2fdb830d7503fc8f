"""Knows the versions of transformers: which ones are tested, and what each one calls the cache.

Everything that depends on the version of transformers asks here.
"""

import importlib.metadata
import re
from typing import Any, NamedTuple

TESTED = ("4.57", "5.12", "5.16", "5.22", "5.23", "5.24")  # the first and last bound what counts as tested
SERVED = ("5.23", "5.24")  # whose loading, batching and generation the features know
BOUNDS = "transformers>=4.57.6,<5.25"


class CacheNames(NamedTuple):
    """The argument with the cache, by what is called."""

    model: str  # a model, a decoder layer or an attention layer
    delta_net: str  # a layer with states
    tells_update: bool  # whether an attention layer hands its other arguments to the cache's `update`


OLD_NAMES = CacheNames("past_key_values", "cache_params", tells_update=False)
NEW_NAMES = CacheNames("cache", "cache", tells_update=True)


def minor(version: str) -> tuple[int, int]:
    """Returns (5, 24) for "5.24.0" or "5.24.0.dev1"."""
    result = re.match(r"(\d+)\.(\d+)", version)
    if result is None:
        raise ValueError(f"transformers: expected a version such as 5.24.0, got {version!r}")
    return int(result[1]), int(result[2])


def is_tested(version: str) -> bool:
    """Returns whether the version lies between the oldest and the newest tested one."""
    return minor(TESTED[0]) <= minor(version) <= minor(TESTED[-1])


def is_served(version: str) -> bool:
    return minor(version) in map(minor, SERVED)


def why_not_served(version: str) -> str:
    """Returns why features that know transformers' own code are off, or ""."""
    return "" if is_served(version) else f"is for transformers {served()}, got {version}"


def names_of(version: str) -> CacheNames:
    return NEW_NAMES if minor(version) >= (5, 24) else OLD_NAMES


def installed() -> str:
    """Returns the installed version, or the newest tested one if there is none."""
    try:
        return importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return f"{TESTED[-1]}.0"


CACHE_NAMES = names_of(installed())  # a constant, which a compiled graph may read


def with_cache(cache: Any) -> dict[str, Any]:
    """Returns the arguments that give a cache to a model."""
    return {CACHE_NAMES.model: cache}


def cache_in(output: Any) -> Any:
    """Returns the cache in a model's output."""
    return getattr(output, CACHE_NAMES.model)


def tested() -> str:
    return f"{', '.join(TESTED[:-1])} and {TESTED[-1]}"


def served() -> str:
    return " and ".join(SERVED)
