"""Keeps conversations, so that earlier turns are not prefilled again.

The conversations form a tree of prefixes. A node holds the tokens that follow its parent's, with their keys and values
and the states after them. Keys can be cut anywhere, but states cannot: a prompt continues from the longest node that it
starts with.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from torch_gdn.integrations.transformers import switch
from torch_gdn.integrations.transformers.cache_pieces import Piece, extract_piece, restore_layer
from torch_gdn.integrations.transformers.versions import CACHE_NAMES, with_cache
from torch_gdn.memory import check_memory

FORMAT = "torch_gdn conversations 1"
CHUNK = 64  # tokens; parts at its multiples have the same chunks as the whole prompt


@dataclass(eq=False)
class Node:
    parent: Node | None
    tokens: list[int]  # those after the parent's
    pieces: dict[int, Piece]  # by layer
    length: int  # tokens from the start on
    children: list[Node] = field(default_factory=list)
    used: int = 0
    held: bool = True

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for piece in self.pieces.values() for tensor in piece.values())

    def path(self) -> list[Node]:
        """Returns the nodes from the root's child to this one."""
        nodes: list[Node] = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


@dataclass(frozen=True)
class Turn:
    """Records what the last `generate` found and did."""

    prompt: int  # tokens
    reused: int
    prefilled: int


class ConversationCache:
    """Keeps keys, values and states of what a model has read and written, for later turns.

    States are kept at the end of each prompt and each answer, and at intervals in between. A turn that repeats the
    conversation then prefills only its own tokens, and one that departs from it continues from the last state before
    that point. The least recently used nodes are dropped first.

    Args:
        model: a transformers model for generation, of full attention, sliding windows and linear attention.
        max_bytes: the most bytes that all keys, values and states may take.
        every: tokens between states within a prompt, a multiple of 64. Default: 512.

    Raises:
        ValueError: If an argument is not as above.
        torch.OutOfMemoryError: On `mps`, if max_bytes and what is allocated exceed what Metal recommends.

    Example:
        >>> conversations = ConversationCache(model, max_bytes=2**30)  # doctest: +SKIP
        >>> tokens = conversations.generate(prompt, max_new_tokens=100)  # doctest: +SKIP
        >>> conversations.last.reused  # doctest: +SKIP
        0
    """

    def __init__(self, model: Any, max_bytes: int, every: int = 512) -> None:
        if max_bytes < 1:
            raise ValueError(f"ConversationCache: max_bytes: expected at least 1, got {max_bytes}")
        if every < CHUNK or every % CHUNK:
            raise ValueError(f"ConversationCache: every: expected a multiple of {CHUNK}, got {every}")
        check_memory("ConversationCache: max_bytes", max_bytes, model.device)
        self.model, self.max_bytes, self.every = model, max_bytes, every
        self.root = Node(None, [], {}, 0)
        self.nbytes = 0
        self.clock = 0
        self.last = Turn(0, 0, 0)

    @torch.no_grad()
    def generate(self, input_ids: Tensor, **options: Any) -> Any:
        """Calls `model.generate` for a whole conversation, and prefills only what is new.

        Args:
            input_ids: [1, T], from the conversation's first token on.
            options: of `model.generate`, without a cache, and without drafts unless `enable(rollback=True)` takes the
                model.

        Returns:
            output: What `model.generate` returns.

        Raises:
            ValueError: If there is more than one row, another cache, drafts without rollback, or padding.
        """
        if input_ids.dim() != 2 or input_ids.shape[0] != 1:
            raise ValueError(f"generate: input_ids: expected shape [1, T], got {list(input_ids.shape)}")
        for name in {"past_key_values", CACHE_NAMES.model} & options.keys():
            raise ValueError(f"generate: {name}: expected None (the conversation has its own), got a cache")
        for name in ("prompt_lookup_num_tokens", "assistant_model", "use_mtp"):
            if options.get(name) is not None and not switch.rolls_back(self.model):
                raise ValueError(f"generate: {name}: expected None, since transformers would prefill the cache again")
        mask = options.setdefault("attention_mask", torch.ones_like(input_ids))
        if not bool(mask.all()):
            raise ValueError("generate: attention_mask: expected only ones, got padding")
        prompt = input_ids[0].tolist()
        node = self.longest_prefix(prompt[:-1])  # the last token's logits are needed
        cache, reused = self.restore_cache(node), node.length
        node = self.prefill(node, input_ids, prompt, cache)
        result = self.model.generate(input_ids, **with_cache(cache), **options)
        self.last = Turn(len(prompt), reused, len(prompt) - reused)
        text = (result if isinstance(result, Tensor) else result.sequences)[0].tolist()
        if node.length < (seen := cache.get_seq_length()) <= len(text):
            self.add(node, text[node.length : seen], cache)
        return result

    def prefill(self, node: Node, input_ids: Tensor, prompt: list[int], cache: DynamicCache) -> Node:
        """Prefills all but the prompt's last token, and keeps a state at each multiple of `every` and at the end."""
        start, last = node.length, len(prompt) - 1
        while start < last:
            end = min(last, (start // self.every + 1) * self.every)
            self.model.base_model(input_ids=input_ids[:, start:end], use_cache=True, **with_cache(cache))
            node = self.add(node, prompt[start:end], cache)
            start = end
        return node

    def longest_prefix(self, tokens: list[int]) -> Node:
        """Returns the longest node that these tokens start with."""
        best, pending = self.root, [self.root]
        while pending:
            node = pending.pop()
            best = max(best, node, key=lambda x: x.length)
            pending += [x for x in node.children if tokens[node.length : x.length] == x.tokens]
        self.touch(best)
        return best

    def restore_cache(self, node: Node) -> DynamicCache:
        """Returns a new cache that holds the node's tokens."""
        cache = DynamicCache(config=self.model.config)
        if path := node.path():
            for index, layer in enumerate(cache.layers):
                restore_layer(layer, [x.pieces[index] for x in path], node.length)
        return cache

    def add(self, parent: Node, tokens: list[int], cache: DynamicCache) -> Node:
        """Returns a node after `parent` with what `cache` holds. If there is no room, the node is not stored."""
        for child in parent.children:
            if child.tokens == tokens:
                self.touch(child)
                return child
        end = parent.length + len(tokens)
        if not parent.held:
            return Node(parent, tokens, {}, end, held=False)
        pieces = {n: extract_piece(layer, parent.length, end) for n, layer in enumerate(cache.layers)}
        node = Node(parent, tokens, pieces, end)
        parent.children.append(node)
        self.nbytes += node.nbytes
        self.touch(node)
        self.shrink()
        return node

    def touch(self, node: Node) -> None:
        """Marks the node as used. A node is as recent as the most recent one after it."""
        self.clock += 1
        for x in node.path():
            x.used = self.clock

    def shrink(self) -> None:
        while self.nbytes > self.max_bytes:
            oldest = min((x for x in self.nodes() if not x.children), key=lambda x: x.used)
            assert oldest.parent is not None
            oldest.parent.children.remove(oldest)
            oldest.held = False
            self.nbytes -= oldest.nbytes
            oldest.pieces = {}

    def nodes(self) -> Iterator[Node]:
        """Returns all nodes but the root, parents first."""
        pending = list(self.root.children)
        while pending:
            node = pending.pop()
            yield node
            pending += node.children

    def clear(self) -> None:
        self.root = Node(None, [], {}, 0)
        self.nbytes = 0

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes all conversations to a safetensors file. It needs `safetensors`."""
        from safetensors.torch import save_file

        nodes = list(self.nodes())
        number = {id(node): n for n, node in enumerate(nodes)}
        tensors = {
            f"{n}.{layer}.{name}": tensor.cpu().contiguous()
            for n, node in enumerate(nodes)
            for layer, piece in node.pieces.items()
            for name, tensor in piece.items()
        }
        tree = [{"parent": number.get(id(x.parent)), "tokens": x.tokens, "used": x.used} for x in nodes]
        about = {"format": FORMAT, "model": identity(self.model), "nodes": json.dumps(tree)}
        save_file(tensors, os.fspath(path), metadata=about)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Replaces all conversations by those that `save` wrote. Beyond `max_bytes` it keeps the most recently used.

        Raises:
            ValueError: If `save` did not write the file, or wrote it for another model.
        """
        from safetensors import safe_open

        device = str(self.model.device)
        with safe_open(os.fspath(path), "pt", device=device) as file:
            about = file.metadata() or {}
            if about.get("format") != FORMAT:
                raise ValueError(f"load: path: expected a file of {FORMAT!r}, got {about.get('format')!r}")
            if about["model"] != (expected := identity(self.model)):
                raise ValueError(f"load: path: expected conversations of model {expected}, got {about['model']}")
            self.clear()
            pieces: dict[int, dict[int, Piece]] = {}
            for name in file.keys():  # noqa: SIM118
                n, layer, part = name.split(".")
                pieces.setdefault(int(n), {}).setdefault(int(layer), {})[part] = file.get_tensor(name)
        nodes: list[Node] = []
        for number, entry in enumerate(json.loads(about["nodes"])):
            parent, tokens = self.root if entry["parent"] is None else nodes[entry["parent"]], entry["tokens"]
            node = Node(parent, tokens, pieces[number], parent.length + len(tokens), used=entry["used"])
            parent.children.append(node)
            nodes.append(node)
        self.nbytes = sum(node.nbytes for node in nodes)
        self.clock = max((node.used for node in nodes), default=0)
        self.shrink()


def identity(model: Any) -> str:
    """Describes the configuration and some numbers of each weight. Further training changes it."""
    config = {k: v for k, v in model.config.to_dict().items() if k not in ("_name_or_path", "transformers_version")}
    result = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, parameter in model.named_parameters():
        sample = parameter.detach().flatten()
        sample = torch.cat([sample[:4], sample[-4:]]).float().cpu()
        result.update(f"{name} {list(parameter.shape)} {parameter.dtype} {sample.tolist()}".encode())
    return result.hexdigest()[:16]
