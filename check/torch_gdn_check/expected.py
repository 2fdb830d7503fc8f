"""Compares what was measured on a Mac with what its memory and launches allow, and with another project."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch_gdn import _macs
from torch_gdn._macs import Mac
from torch_gdn.tools.expect import LAUNCH_SECONDS
from torch_gdn_check.steps import PASS, Result

# Another project's kernel took this for a prompt's delta rule, at the sizes of Qwen3.5-27B on an M3 Ultra:
# github.com/raullenchai/Rapid-MLX/pull/2144, 2.67 ms for 2,048 tokens.
YARDSTICK_MODEL, YARDSTICK_MICROSECONDS = "Qwen3.5-27B", 1.3


def this_mac(machine: dict[str, Any]) -> Mac | None:
    """Returns the Mac with these facts: the smallest variant of the chip that has as many GPU cores."""
    known = _macs.variants(str(machine.get("chip")))
    enough = [mac for mac in known if mac.cores >= (machine.get("GPU cores") or 0)]
    return min(enough, key=lambda mac: mac.cores, default=None)


def lines(results: list[Result], machine: dict[str, Any]) -> Iterator[str]:
    """Yields a line for each time of a prompt, of a decoded token and of the small model."""
    mac = this_mac(machine)
    for result in results:
        if result.status != PASS:
            continue
        if (result.section, result.group) == ("timing", "prefill"):
            yield prefill(result)
        elif (result.section, result.group) == ("timing", "decode") and mac:
            seconds, moved = result.figures["torch_gdn"]["seconds"], result.figures["state_bytes"]
            yield f"decode, {result.case}: {share(moved / seconds, mac)} for the state of a layer"
        elif result.section == "model" and mac:
            yield small_model(result.figures, mac)


def share(rate: float, mac: Mac) -> str:
    return f"{rate / 1e9:.0f} of {mac.bandwidth} GB/s ({rate / (mac.bandwidth * 1e9):.0%})"


def prefill(result: Result) -> str:
    each = result.figures["torch_gdn"]["seconds"] / result.figures["tokens"] * 1e6
    other = f"; Rapid-MLX on an M3 Ultra: {YARDSTICK_MICROSECONDS}" if result.case == YARDSTICK_MODEL else ""
    return f"prefill, {result.case}: {each:.2f} us per token and layer{other}"


def small_model(figures: dict[str, Any], mac: Mac) -> str:
    decode, moved = figures["tokens_per_second"]["torch_gdn"]["decode"], figures["moved"]
    by_memory, by_launches = mac.bandwidth * 1e9 / moved, 1 / (figures["launches"] * LAUNCH_SECONDS[0])
    at_most = f"the memory allows at most {by_memory:.0f}, launches of 5 us at most {by_launches:.0f}"
    return f"model: {decode:.0f} tokens/s decoded, {share(decode * moved, mac)}; {at_most}"
