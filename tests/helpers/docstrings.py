"""Reads what a docstring states about tensors, and compares it with a call.

An entry of `Args:` or `Returns:` is `names: claim. More sentences.` The claim about a tensor is `shape, dtype`, for a
result `shape, dtype; condition`:

    shape      [B, HV * K, ceil(D * bits / 32)]  expressions of sizes; a name stands for one size in the whole call
               [..., D]                          any sizes, the same in the whole call, then D
               [T] or [B, T]                     either
               [K, V] ([V, K] with option)       the second if the argument `option` is set; `without`: if it is not
               x's shape; any shape; HV elements in any shape
    dtype      float32; int32 or int64; any floating dtype; any dtype
               x's dtype                         that of an argument or a result
               x's dtype or int32                either; x's dtype, int32 or uint8
               output_dtype, or x's dtype        the first that the call has
               bfloat16 if q and v are bfloat16, else float32
    condition  None unless option; [0] unless option; only with option

`x's shape and dtype` is short for both. An argument that must be None has the claim `None`. ``See `f`.`` stands for the
entry of that name in the docstring of f. A sentence `N is B without cu_seqlens` in any entry gives the value of a size
that no argument has; `` `f` defines NT.`` says that the docstring of f has this sentence.
"""

from __future__ import annotations

import inspect
import itertools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

import torch_gdn

Function = Callable[..., Any]
Call = dict[str, Any]

ANY = {
    "any floating dtype": {torch.bfloat16, torch.float16, torch.float32, torch.float64},
    "any dtype": {each for each in vars(torch).values() if isinstance(each, torch.dtype)},
}
BRACKETS = r"\[[^\]]*\]"
SHAPE = (
    rf"{BRACKETS}(?: or {BRACKETS}| \({BRACKETS} with(?:out)? \w+\)|, {BRACKETS})*"
    r"|\w+'s shape|any shape|[\w* ]+ elements in any shape"
)
CLAIM = re.compile(
    rf"(?P<shape>{SHAPE}), (?P<dtype>[^;]+?)(?:; (?P<condition>None unless|\[0\] unless|only with) (?P<option>\w+))?"
)
EXPRESSION = r"(?:ceil\([^()]*\)|[A-Z]+)(?: [-+*] (?:[A-Z]+|\d+))*"


def is_set(option: Any) -> bool:
    return option is not None and option is not False


@cache
def entries(function: Function, title: str) -> dict[str, str]:
    """Returns the texts of the entries of `Args:` or `Returns:`, by name."""
    match = re.search(rf"^{title}:\n((?:    .*\n|\n)+)", f"{inspect.getdoc(function)}\n", flags=re.MULTILINE)
    result: dict[str, str] = {}
    for each in re.split(r"\n(?=    \S)", match[1]) if match else ():
        names, colon, text = " ".join(each.split()).partition(":")
        if colon:
            result |= dict.fromkeys(names.split(", "), text.strip())
    return result


def entry(function: Function, title: str, name: str) -> str:
    """Returns the text of one entry, or that of another function's if the entry refers to it."""
    text = entries(function, title)[name]
    elsewhere = re.match(r"See `(\w+)`\. ?", text)
    if elsewhere is None:
        return text
    return f"{entry(getattr(torch_gdn, elsewhere[1]), title, name)} {text[elsewhere.end() :]}".strip()


def all_texts(function: Function) -> list[str]:
    return [entry(function, title, name) for title in ("Args", "Returns") for name in entries(function, title)]


@dataclass(frozen=True)
class Claim:
    shape: str
    dtype: str
    condition: str | None = None
    option: str | None = None


def claim_of(text: str) -> Claim:
    sentence = re.split(r"\.(?:\s|$)", text)[0]
    sentence = re.sub(r"(\w+)'s shape and dtype", r"\1's shape, \1's dtype", sentence)
    if sentence == "None":
        return Claim("", "")
    match = CLAIM.fullmatch(sentence)
    if match is None:
        raise ValueError(f"no shape and dtype in {sentence!r}")
    return Claim(**match.groupdict())


@dataclass
class Statements:
    """All that a function's docstring states about tensors."""

    function: Function
    defaults: Call = field(init=False)
    texts: list[str] = field(init=False)
    arguments: dict[str, Claim] = field(init=False)
    results: dict[str, Claim] = field(init=False)

    def __post_init__(self) -> None:
        parameters = inspect.signature(self.function).parameters.values()
        self.defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
        tensors = [each.name for each in parameters if "Tensor" in str(each.annotation)]
        self.arguments = {name: claim_of(entry(self.function, "Args", name)) for name in tensors}
        results = entries(self.function, "Returns")
        self.results = {name: claim_of(entry(self.function, "Returns", name)) for name in results}
        self.texts = all_texts(self.function)
        for name in re.findall(r"`(\w+)` defines", " ".join(self.texts)):
            self.texts += all_texts(getattr(torch_gdn, name))

    def check(self, call: Call) -> None:
        """Calls the function and compares every argument and result with its claim."""
        results = self.function(**call)
        result = [] if results is None else list(results) if isinstance(results, tuple) else [results]
        call = self.defaults | call
        compared = Comparison(self, call)
        tensors = {name: call[name] for name in self.arguments if isinstance(call[name], Tensor)}
        for name, x in tensors.items():
            allowed = compared.dtypes(self.arguments[name].dtype)
            assert x.dtype in allowed, f"{name}: {x.dtype}, stated {self.arguments[name].dtype}"
        compared.sizes(tensors, self.arguments)
        compared.define()
        unset = [name for name, each in self.results.items() if each.option and not is_set(call[each.option])]
        stated = {n: claim for n, claim in self.results.items() if n not in unset or claim.condition != "only with"}
        assert len(result) == len(stated), f"{len(result)} results, stated {list(stated)}"
        present = {}
        for (name, claim), x in zip(stated.items(), result, strict=True):
            if name not in unset:
                assert {x.dtype} == compared.dtypes(claim.dtype), f"{name}: {x.dtype}, stated {claim.dtype}"
                present[name] = x
            elif claim.condition == "None unless":
                assert x is None, f"{name}: {x}, stated None"
            else:
                assert x.shape == (0,), f"{name}: {x.shape}, stated [0]"
        compared.sizes(present, self.results)

    def optional_results(self) -> Call:
        options = {claim.option for claim in self.results.values() if claim.option is not None}
        return {name: True for name in options if self.defaults[name] is False}

    def recast(self, call: Call, name: str, dtype: torch.dtype) -> Call:
        """Returns the call with another dtype of one argument, and of those that are stated to share it."""
        changed = call | {name: call[name].to(dtype)}
        for other in self.arguments:
            if other == name or not isinstance(call.get(other), Tensor):
                continue
            allowed = self.dtypes_of(other, changed)
            if changed[other].dtype not in allowed:
                # Floats stay floats. If int32 is allowed too, it is for tensors of another size.
                same_kind = [x for x in allowed if x.is_floating_point == changed[other].is_floating_point()]
                changed[other] = changed[other].to((same_kind or [*allowed])[0])
        return changed

    def dtypes_of(self, name: str, call: Call) -> set[torch.dtype]:
        return Comparison(self, self.defaults | call).dtypes(self.arguments[name].dtype)

    def refuses(self, call: Call) -> bool:
        try:
            self.function(**call)
        except TypeError:
            return True
        return False


class Comparison:
    """One call, and the sizes that its tensors give to the names in shapes."""

    def __init__(self, statements: Statements, call: Call) -> None:
        self.statements, self.call = statements, call
        self.known: dict[str, Any] = {name: x for name, x in call.items() if type(x) is int}

    def dtypes(self, phrase: str) -> set[torch.dtype]:
        for each in phrase.split(", or "):
            if result := self.dtypes_of_one(each):
                return result
        raise AssertionError(f"{phrase!r} names nothing that the call has")

    def dtypes_of_one(self, phrase: str) -> set[torch.dtype]:
        if phrase in self.call:
            return {self.call[phrase]} - {None}
        if either := re.fullmatch(r"(\w+'s? dtype)(?: or|,) (\w+(?: or \w+)?)", phrase):
            return self.dtypes_of_one(either[1]) | self.dtypes_of_one(either[2])
        if owner := re.fullmatch(r"(\w+)'s? dtype", phrase):
            if owner[1] not in self.call:
                return self.dtypes(self.statements.results[owner[1]].dtype)
            x = self.call[owner[1]]
            return {x.dtype} if isinstance(x, Tensor) else set()
        if choice := re.fullmatch(r"(\w+) if ([\w ]+?) (?:is|are) (\w+), else (.+)", phrase):
            all_are = all(self.call[name].dtype == getattr(torch, choice[3]) for name in choice[2].split(" and "))
            return self.dtypes_of_one(choice[1 if all_are else 4])
        dtypes = ANY.get(phrase) or {getattr(torch, name, None) for name in re.split(r", | or ", phrase)}
        assert all(isinstance(dtype, torch.dtype) for dtype in dtypes), f"no dtype: {phrase!r}"
        return dtypes

    def sizes(self, tensors: dict[str, Tensor], claims: dict[str, Claim]) -> None:
        """Compares shapes with claims. A name gets its size where it stands alone if possible, and never from ceil."""
        pairs = [pair for name, x in tensors.items() for pair in self.pairs(name, x, claims[name].shape)]
        for name, expression, size in sorted(pairs, key=lambda pair: (not pair[1].isidentifier(), "ceil" in pair[1])):
            self.learn(expression, size)
            result = self.value(expression)
            assert result == size, f"{name}: {expression} is {result}, got {size} in {list(tensors[name].shape)}"

    def pairs(self, name: str, x: Tensor, shape: str) -> Iterator[tuple[str, str, Any]]:
        """Yields the expressions of the claimed shape, each with the value it must have."""
        if shape == "any shape":
            return
        if same_shape := re.fullmatch(r"(\w+)'s shape", shape):
            other = self.call[same_shape[1]]
            assert x.shape == other.shape, f"{name}: {list(x.shape)}, stated {shape}, {list(other.shape)}"
            return
        if flat := re.fullmatch(r"(.*) elements in any shape", shape):
            yield name, flat[1], x.numel()
            return
        if choice := re.fullmatch(rf"({BRACKETS}) \(({BRACKETS}) with(out)? (\w+)\)", shape):
            shape = choice[2 if is_set(self.call[choice[4]]) != bool(choice[3]) else 1]
        patterns = [pattern[1:-1].split(", ") for pattern in re.findall(BRACKETS, shape)]
        fitting = [pattern for pattern in patterns if self.fits(pattern, x)]
        assert fitting, f"{name}: {list(x.shape)}, stated {shape}"
        pattern, sizes = fitting[0], list(x.shape)
        if pattern[0] == "...":
            leading = x.dim() - len(pattern) + 1
            sizes = [tuple(sizes[:leading]), *sizes[leading:]]
        yield from zip(itertools.repeat(name), pattern, sizes, strict=False)

    @staticmethod
    def fits(pattern: list[str], x: Tensor) -> bool:
        if pattern[0] == "...":
            return x.dim() >= len(pattern) - 1
        numbers = zip(pattern, x.shape, strict=False)
        return x.dim() == len(pattern) and all(int(n) == size for n, size in numbers if n.isdecimal())

    def unknown(self, expression: str) -> list[str]:
        names = ["..."] if expression == "..." else re.findall(r"[A-Za-z_]\w*", expression)
        return [name for name in dict.fromkeys(names) if name not in self.known and name != "ceil"]

    def learn(self, expression: str, size: Any) -> None:
        unknown = self.unknown(expression)
        if unknown == [expression]:
            self.known[expression] = size
        elif len(unknown) == 1 and "ceil" not in expression:
            values = (n for n in range(size + 1) if self.value(expression, {unknown[0]: n}) == size)
            self.known[unknown[0]] = next(values)

    def value(self, expression: str, more: dict[str, int] | None = None) -> Any:
        if expression == "...":
            return self.known["..."]
        values = {"ceil": math.ceil, **self.known, **(more or {})}
        missing = [name for name in self.unknown(expression) if name not in values]
        assert not missing, f"{expression}: no argument gives {missing}"
        return eval(expression, {"__builtins__": {}}, values)

    def define(self) -> None:
        """Gives sizes that no argument has the value that a sentence states."""
        for text in self.statements.texts:
            for name, sentence in re.findall(r"\b([A-Z]+) is ([^.;]+)", text):
                for each in re.split(r", (?:and |or )?", sentence):
                    match = re.fullmatch(rf"({EXPRESSION})(?: (with|without) (\w+))?", each)
                    if match is None or name in self.known or self.unknown(match[1]):
                        continue
                    if match[2] is None or is_set(self.call[match[3]]) == (match[2] == "with"):
                        self.known[name] = self.value(match[1])
