"""Tests drafts of another model with DFlash, and drafts behind images: tokens equal those without drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.devices import ready
from tests.integrations.drafted import QWEN, Steps, files, layer_of, loaded
from tests.integrations.models import SIZES, distance, random_tokens
from tests.integrations.serving import GREEDY_TOKENS, greedy, other_version
from tests.integrations.test_transformers import BAR
from torch_gdn.integrations import transformers

if reason := other_version("rollback"):
    pytest.skip(reason, allow_module_level=True)
from transformers import AutoModel, MuseGlimmerAssistantConfig, Qwen3_5Config, Qwen3_5ForConditionalGeneration

pytestmark = pytest.mark.usefixtures("serving")
each_device = pytest.mark.parametrize("device_name", ["cpu", "mps"])
IMAGE = 60  # the token in whose places the image's tokens are


def dflash(token: int) -> Any:
    """Returns a model that drafts this token only: it adds next to nothing to the embedding of its mask."""
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    tokens = {"mask_token_id": token, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    layers = {"num_hidden_layers": 1, "head_dim": 32, "target_layer_ids": [0], "block_size": 4}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModel.from_config(
            MuseGlimmerAssistantConfig(initializer_range=1e-3, **sizes, **tokens, **layers)
        ).eval()


@each_device
def test_dflash(device_name: str, tmp_path: Path) -> None:
    """Drafts of a token that the text has several times are right there."""
    device, model, prompt = ready(device_name), loaded(files(tmp_path, "qwen3_5", "always")), random_tokens(1, 20)
    tokens, logits = greedy(model, prompt)
    transformers.enable(rollback=True)
    model = model.to(device)
    steps = Steps(model)
    draft = dflash(max(tokens, key=tokens.count)).to(device)
    result, found_logits = greedy(model, prompt, assistant_model=draft, speculation_type="dflash")
    assert result == tokens
    assert distance(found_logits, logits) < BAR
    assert 5 <= steps.taken < GREEDY_TOKENS
    assert transformers.status().fallbacks == {}


def model_of_images(folder: Path) -> Any:
    """Makes a model of text and images with a prediction layer."""
    sizes = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64}
    sizes |= {"patch_size": 4, "temporal_patch_size": 1, "spatial_merge_size": 2, "num_position_embeddings": 16}
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    tokens = {name: IMAGE + n for n, name in enumerate(names)}
    text = SIZES | {"mtp_num_hidden_layers": 1}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=sizes, **tokens))
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    text_tensors = {name.replace("language_model.", ""): x for name, x in tensors.items()}
    own = layer_of(model.model.language_model, text_tensors, 1.0, 0.0, 0.01)
    assert all(name.startswith(QWEN[1]) for name in own)
    save_file(tensors | own, file, metadata={"format": "pt"})
    return Qwen3_5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()


@each_device
def test_drafts_behind_an_image(device_name: str, tmp_path: Path) -> None:
    """The image has 4 tokens, whose positions are those of a square, so that the text behind it is 2 places earlier.
    The text ends as it begins, so that prompt lookup would draft the image again.
    """
    device, model = ready(device_name), model_of_images(tmp_path)
    before, after = (random_tokens(1, 6, seed=seed) % IMAGE for seed in (1, 2))
    image = torch.tensor([[IMAGE + 2, *[IMAGE] * 4, IMAGE + 3]])
    prompt = torch.cat([before, image, after, before], 1)
    given: dict[str, Any] = {
        "pixel_values": torch.randn(16, 48, generator=torch.Generator().manual_seed(0)),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "mm_token_type_ids": (prompt == IMAGE).int(),
    }
    tokens, logits = greedy(model, prompt, **given)
    transformers.enable(rollback=True)
    model, given = model.to(device), {name: x.to(device) for name, x in given.items()}
    for options in ({"use_mtp": True}, {"prompt_lookup_num_tokens": 3}):
        result, found_logits = greedy(model, prompt, **given, **options)
        assert result == tokens, options
        assert distance(found_logits, logits) < BAR, options
    assert transformers.status().fallbacks == {}
