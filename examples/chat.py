"""Holds a conversation in the terminal without prefilling earlier turns again.

    python examples/chat.py                      # completes Python code with the model in examples/pycode
    python examples/chat.py --model Qwen/Qwen3.5-0.8B --device mps

Your text is appended to the conversation, and the answer is printed as it is generated. After each turn the program
prints how many tokens it reused and prefilled, the tokens per second, and the size of the cache. An empty line ends
it. With --file it reads the conversations at the start and saves them at the end.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from torch_gdn._mps import why_no_mps
from torch_gdn.integrations import transformers as integration

PYCODE = Path(__file__).resolve().parent / "pycode"


class Bytes:
    """Turns for the model in examples/pycode, which continues text. A turn appends text."""

    def __init__(self) -> None:
        self.conversation: list[int] = []

    def told(self, text: str) -> list[int]:
        return self.conversation + list(f"{text}\n".encode())

    def answered(self, tokens: list[int]) -> None:
        self.conversation = tokens

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")


class Messages:
    """Turns by a tokenizer's chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.messages: list[dict[str, str]] = []
        self.prompt: list[int] = []

    def told(self, text: str) -> list[int]:
        self.messages.append({"role": "user", "content": text})
        self.prompt = self.tokenizer.apply_chat_template(self.messages, add_generation_prompt=True, return_dict=False)
        return self.prompt

    def answered(self, tokens: list[int]) -> None:
        answer = self.tokenizer.decode(tokens[len(self.prompt) :], skip_special_tokens=True)
        self.messages.append({"role": "assistant", "content": answer})

    def decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)


class Printer:
    """A streamer for transformers. It prints what is new of the answer's text, and keeps when its first token came."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self.decode, self.shown, self.first = decode, "", 0.0
        self.tokens: list[int] = []
        self.prompt_was_put = False

    def put(self, tokens: torch.Tensor) -> None:
        if not self.prompt_was_put:
            self.prompt_was_put = True
            return
        self.first = self.first or time.perf_counter()
        self.tokens += tokens.flatten().tolist()
        text = self.decode(self.tokens)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # not a character whose last bytes are missing
            print(text[len(self.shown) :], end="", flush=True)
            self.shown = text

    def end(self) -> None:
        print(flush=True)


def turn(conversations: Any, chat: Bytes | Messages, text: str, new_tokens: int) -> str:
    """Answers, and prints the figures."""
    prompt, printer, start = chat.told(text), Printer(chat.decode), time.perf_counter()
    input_ids = torch.tensor([prompt], device=conversations.model.device)
    tokens = conversations.generate(input_ids, max_new_tokens=new_tokens, do_sample=False, streamer=printer)
    end = time.perf_counter()
    chat.answered(tokens[0].tolist())
    took, speed = conversations.last, (len(printer.tokens) - 1) / max(end - printer.first, 1e-9)
    return (
        f"[{took.reused} of {took.prompt} tokens reused, {took.prefilled} prefilled in {printer.first - start:.2f} s; "
        f"{len(printer.tokens)} new, {speed:.1f} tokens/s; cache {conversations.nbytes / 1e6:.1f} MB]"
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(PYCODE), help="a name or folder for from_pretrained (examples/pycode)")
    parser.add_argument("--device", default="mps" if torch.backends.mps.is_available() else "cpu")
    parser.add_argument("--new-tokens", type=int, default=80, help="most tokens of an answer (80)")
    parser.add_argument("--megabytes", type=int, default=1024, help="most memory of the conversations' cache (1024)")
    parser.add_argument("--file", type=Path, help="file to read conversations from and to save them to")
    given = parser.parse_args(arguments)
    if given.device == "mps" and (reason := why_no_mps("examples/chat.py")):
        sys.exit(f"--device mps: {reason}")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()

    from torch_gdn.integrations.transformers.conversation import ConversationCache

    own = Path(given.model) == PYCODE
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32 if own else "auto")
    chat = Bytes() if own else Messages(AutoTokenizer.from_pretrained(given.model))
    integration.enable()
    conversations = ConversationCache(model.eval().to(given.device), given.megabytes * 10**6, every=64)
    if given.file and given.file.exists():
        conversations.load(given.file)
    while True:
        print("> " if sys.stdin.isatty() else "", end="", flush=True)
        if not (text := sys.stdin.readline().rstrip("\n")):
            break
        print(turn(conversations, chat, text, given.new_tokens), flush=True)
    if given.file:
        conversations.save(given.file)


if __name__ == "__main__":
    main()
