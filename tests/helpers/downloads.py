"""Importing this replaces what programs download by a small random model and a tokenizer of bytes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.integrations.drafted import files
from tests.integrations.models import VOCABULARY


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


FOLDER = tempfile.TemporaryDirectory()  # deleted when the program ends
DOWNLOADED = transformers.Qwen3_5ForCausalLM.from_pretrained
files(Path(FOLDER.name), "qwen3_5", "always")  # with a prediction layer
transformers.AutoModelForCausalLM.from_pretrained = lambda *_, **__: DOWNLOADED(FOLDER.name, dtype="float32").eval()
transformers.AutoTokenizer.from_pretrained = lambda *_: Bytes()
