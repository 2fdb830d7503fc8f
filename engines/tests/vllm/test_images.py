"""Qwen3.5 with its vision tower: prompts with an image and without one; tokens equal transformers' generate()."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engines.tests.vllm.conftest import GREEDY_TOKENS, run_engine, scenario
from tests.helpers.small_models import COMMON, LINEAR, TEXT, bytes_to_characters

SPECIAL = ["<|endoftext|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
PATCHES = {"patch_size": 8, "temporal_patch_size": 2}
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


def config() -> Any:
    import transformers

    end, start, stop, image, video = (256 + i for i in range(len(SPECIAL)))
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    text = {
        **COMMON,
        **LINEAR,
        "head_dim": 64,
        "vocab_size": 264,
        "bos_token_id": end,
        "eos_token_id": end,
        "rope_parameters": {**rope, "mrope_section": [3, 3, 2], "mrope_interleaved": True},
    }
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
    return transformers.Qwen3_5Config(
        text_config=text,
        vision_config={**vision, **PATCHES, "spatial_merge_size": 2, "num_position_embeddings": 64},
        vision_start_token_id=start,
        vision_end_token_id=stop,
        image_token_id=image,
        video_token_id=video,
    )


def processor() -> Any:
    """Tokens are bytes; images of at most 64 x 64."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    bytewise = Tokenizer(models.BPE(vocab={each: i for i, each in enumerate(bytes_to_characters())}, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytewise.decoder = decoders.ByteLevel()
    bytewise.add_special_tokens(SPECIAL)
    names = ["vision_bos_token", "vision_eos_token", "image_token", "video_token"]
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bytewise,
        eos_token=SPECIAL[0],
        pad_token=SPECIAL[0],
        extra_special_tokens=dict(zip(names, SPECIAL[1:], strict=True)),
    )
    sizes = {"shortest_edge": 32 * 32, "longest_edge": 64 * 64}
    return transformers.Qwen3VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(**PATCHES, merge_size=2, size=sizes),
        video_processor=transformers.Qwen3VLVideoProcessor(**PATCHES, merge_size=2, size=sizes),
        tokenizer=tokenizer,
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], list[Any], list[Any]]:
    """(folder, texts, pixels, tokens)"""
    import transformers

    path = tmp_path_factory.mktemp("images")
    torch.manual_seed(0)
    seeing = transformers.Qwen3_5ForConditionalGeneration(config()).eval()
    for name, parameter in seeing.named_parameters():
        if parameter.dim() > 1 and "conv" not in name:
            torch.nn.init.normal_(parameter, std=0.1)
    seeing.save_pretrained(path)
    prepare = processor()
    prepare.save_pretrained(path)
    texts, pixels, tokens = [], [], []
    for i in range(4):
        words = TEXT[50 * i : 50 * i + 20 + 9 * i].decode()
        image = torch.randint(256, (32 + 16 * i, 48, 3), dtype=torch.uint8) if i != 1 else None
        texts.append(words if image is None else IMAGE + words)
        pixels.append(image if image is None else image.tolist())
        inputs = prepare(text=texts[-1:], images=None if image is None else [image.numpy()], return_tensors="pt")
        out = seeing.generate(**inputs, max_new_tokens=GREEDY_TOKENS, do_sample=False, eos_token_id=None)
        tokens.append(out[0, inputs["input_ids"].shape[1] :].tolist())
    return path, texts, pixels, tokens


def test_tokens_equal_generate(device: str, model: Any) -> None:
    path, texts, pixels, tokens = model
    options = {"max_num_batched_tokens": 256, "max_model_len": 256, "skip_tokenizer_init": False}
    options |= {"skip_mm_profiling": True, "limit_mm_per_prompt": {"image": 1, "video": 0}}
    result = run_engine(device, scenario(path, texts, {"images": pixels}, **options))
    assert result["rounds"][0]["tokens"] == tokens
    assert result["compiled late"] == []
