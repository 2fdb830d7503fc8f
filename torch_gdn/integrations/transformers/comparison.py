"""Compares models on a version of transformers that nobody tested, before their classes are replaced.

Each model is made small, with random weights, and generates on the CPU: with transformers' code, and with the code that
otherwise runs on mps. A model whose logits differ is left to transformers, with a warning. The verdicts are kept.
"""

import hashlib
import importlib
import inspect
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_gdn import self_test
from torch_gdn._version import __version__
from torch_gdn.integrations.transformers import dispatch, known_forms, small_models, versions
from torch_gdn.integrations.transformers.patches import Patch
from torch_gdn.self_test import verdicts
from torch_gdn.self_test.verdicts import Verdict

NEW_TOKENS = 8
LENGTHS = (7, 4)  # of the prompts; the shorter one is padded
TOLERANCE = 1e-3  # of logits with a standard deviation near 1, which another meaning of anything exceeds
# What all models share is compared in a model whose experts are called by name.
COMPARED_IN = {"experts": "qwen3_next"}
Patches = dict[str, list[Patch]]


def agreeing(candidates: Patches, version: str) -> tuple[Patches, dict[str, str]]:
    """Returns the patches without those of models whose results would change, and what changes in these."""
    key = key_of(version)
    known = {} if self_test.mode() == "again" else verdicts.read(key)
    kept, skipped, new = {}, {}, dict(known)
    for name, patches in candidates.items():
        verdict = verdict_of(name, patches, known, new)
        if verdict.problem:
            skipped[name] = f"transformers {version} is not tested, and {verdict.problem}"
            warnings.warn(
                f"torch_gdn leaves {name} to transformers {version}, because {verdict.problem}. It is tested with "
                f"transformers {versions.tested()}",
                stacklevel=4,
            )
        else:
            kept[name] = patches
    if new != known:
        verdicts.change(key, new)
    return kept, skipped


def verdict_of(name: str, patches: list[Patch], known: dict[str, Verdict], new: dict[str, Verdict]) -> Verdict:
    kind = COMPARED_IN.get(name, name)
    if not patches or not is_model(kind):  # it changes how a model is loaded, not what it computes
        return Verdict(name, None)
    case = f"{name} {source_of(patches)}"
    if case not in known:
        new[case] = Verdict(name, None, problem_of(kind, patches))
    return new[case]


def is_model(kind: str) -> bool:
    return importlib.util.find_spec(f"transformers.models.{kind}") is not None


def problem_of(kind: str, patches: list[Patch]) -> str:
    """Returns what the patches change in the model's results, or "" if nothing."""
    with known_forms.trial():
        try:
            model = remembering(small_models.make(kind))
            expected = logits_of(model)
        except Exception as error:
            return f"a small {kind} does not run: {type(error).__name__}: {error}"
        try:
            with applied(patches), known_forms.on_every_device():
                result = logits_of(model)
        except Exception as error:
            return f"{type(model).__name__} does not run with it: {type(error).__name__}: {error}"
    if result.shape == expected.shape and torch.allclose(result, expected, rtol=TOLERANCE, atol=TOLERANCE):
        return ""
    return f"the logits of {type(model).__name__} differ"


@contextmanager
def applied(patches: Iterable[Patch]) -> Iterator[None]:
    done, before = [], dispatch.enabled
    dispatch.enabled = True
    try:
        for patch in patches:
            patch.apply()
            done.append(patch)
        yield
    finally:
        dispatch.enabled = before
        for patch in reversed(done):
            patch.revert()


def remembering(model: Any) -> Any:
    """Changes gates so that states remember many tokens, and scales the head so that logits are near 1."""
    for name, weight in model.named_parameters():
        if name.endswith("A_log"):
            weight.zero_()
        elif name.endswith("dt_bias"):
            weight.fill_(-3.0)
    head = model.get_output_embeddings().weight
    head.mul_(head.shape[-1] ** -0.5 / head.std())
    return model


def logits_of(model: Any) -> Tensor:
    """Returns the logits of greedy tokens after prompts padded on the left, and after one prompt without a mask."""
    tokens = torch.arange(1, 1 + max(LENGTHS) * len(LENGTHS)).view(len(LENGTHS), -1)
    mask = torch.stack([torch.arange(max(LENGTHS)) >= max(LENGTHS) - length for length in LENGTHS]).long()
    options: dict[str, Any] = {
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
        "eos_token_id": None,
    }
    options |= {"max_new_tokens": NEW_TOKENS, "pad_token_id": 0}
    padded = model.generate(tokens * mask, attention_mask=mask, **options)
    alone = model.generate(tokens[:1], **options | {"max_new_tokens": 2})
    return torch.cat([*padded.logits, *alone.logits])


# ---- which verdicts apply --------------------------------------------------------------------------------------------


def key_of(version: str) -> str:
    """Names the software. A checkout's code changes without a new version."""
    ours = digest(sorted(Path(__file__).parent.rglob("*.py")))
    return f"transformers {version}, torch {torch.__version__}, torch_gdn {__version__}, integration {ours}"


def source_of(patches: list[Patch]) -> str:
    """Returns a digest of the files that define what is replaced, and of transformers' caches."""
    files = {inspect.getsourcefile(importlib.import_module("transformers.cache_utils"))}
    files |= {inspect.getsourcefile(inspect.unwrap(x.original)) for x in patches if callable(x.original)}
    return digest(sorted(Path(file) for file in files if file is not None))


def digest(files: Iterable[Path]) -> str:
    result = hashlib.sha256()
    for file in files:
        result.update(file.read_bytes())
    return result.hexdigest()[:12]
