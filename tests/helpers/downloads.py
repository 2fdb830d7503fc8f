"""Importing this replaces what programs download by a small random model and a tokenizer of bytes."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from tests.integrations.models import VOCABULARY, random_model


class Bytes:
    """A tokenizer in which each byte of a text is a token."""

    def __call__(self, text: str | list[str], return_tensors: str | None = None) -> transformers.BatchEncoding:
        texts = [text] if isinstance(text, str) else text
        tokens: Any = [[1 + byte % (VOCABULARY - 1) for byte in each.encode()] for each in texts]
        if return_tensors is None:
            return transformers.BatchEncoding({"input_ids": tokens})
        tokens = torch.tensor(tokens)
        return transformers.BatchEncoding({"input_ids": tokens, "attention_mask": torch.ones_like(tokens)})

    def decode(self, tokens: torch.Tensor) -> str:
        return str(tokens.tolist())


transformers.AutoModelForCausalLM.from_pretrained = lambda *_, **__: random_model("qwen3_5")
transformers.AutoTokenizer.from_pretrained = lambda *_: Bytes()
