"""Prints what a bug report needs: `python -m torch_gdn info`."""

import importlib.metadata
import platform
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

import torch_gdn
from torch_gdn import _C, command_line
from torch_gdn._mps import command_output, why_no_mps
from torch_gdn.self_test import plan, verdicts
from torch_gdn.tools.tune import rule_inputs


def versions() -> dict[str, str]:
    result = {"python": sys.version.split()[0]}
    for name in ("torch_gdn", "torch", "transformers", "flash-linear-attention", "kernels"):
        try:
            result[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            result[name] = "not installed"
    return result


def chip() -> str:
    if sys.platform == "darwin":
        return command_output("sysctl", "-n", "machdep.cpu.brand_string")
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            models = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        models = []
    return models[0] if models else platform.processor() or "unknown"


def system() -> dict[str, str]:
    facts = {"system": platform.platform(), "chip": chip(), "threads of torch": str(torch.get_num_threads())}
    facts["threads of torch_gdn on the CPU"] = str(_C.cpu_threads())
    if sys.platform == "darwin":
        facts["macOS"] = platform.mac_ver()[0]
        facts["memory"] = command_output("sysctl", "-n", "hw.memsize") + " bytes"
    return facts


def mps() -> dict[str, str]:
    reason = why_no_mps("info")
    facts = {"available": f"False: {reason}" if reason else "True", "shaders": _C.shader_directory()}
    if _C.has_launcher():
        facts |= {name.replace("_", " "): str(value) for name, value in _C.device_facts().items()}
    return facts


def agreement(device: str) -> str:
    """Returns the relative distance between both ops' outputs on a small input, or the error that was raised."""
    inputs = rule_inputs((1, 2, 64, 64), 70, 1, torch.float32)
    del inputs["initial_state"], inputs["output_final_state"]
    inputs = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in inputs.items()}
    try:
        chunked, _ = torch_gdn.chunk_gated_delta_rule(**inputs)
        recurrent, _ = torch_gdn.fused_recurrent_gated_delta_rule(**inputs)
        distance = (chunked.cpu() - recurrent.cpu()).norm() / recurrent.cpu().norm()
    except Exception as error:  # a report about a failure must not fail itself
        return f"{type(error).__name__}: {error}"
    return f"relative distance {float(distance):.1e}, {'ok' if distance < 1e-5 else 'WRONG'}"


def ops() -> list[str]:
    """Lists each op and the devices that it has a kernel for."""
    names = sorted({schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("gdn::")})
    return [
        f"{name}: "
        + ", ".join(key for key in ("CPU", "MPS") if torch._C._dispatch_has_kernel_for_dispatch_key(name, key))
        for name in names
    ]


def pipelines() -> list[str]:
    if not _C.has_launcher():
        return []
    return [
        f"{facts['name']}: compiled in {facts['compile_seconds'] * 1e3:.0f} ms, "
        f"at most {facts['max_total_threads_per_threadgroup']} threads, "
        f"{facts['static_threadgroup_memory_length']} bytes of threadgroup memory"
        for facts in _C.pipelines()
    ]


def self_tested() -> list[str]:
    """Returns what the self-test found on this machine, in this process or another."""
    if not _C.has_launcher():
        return []
    known = verdicts.settled(verdicts.machine()).values()
    _, _, reasons = plan(known)
    lines = [f"{sum(not x.problem for x in known)} kernel variants passed" if known else "not run on this machine yet"]
    return lines + [f"FAILED: {name}: {reason}" for name, reason in reasons.items()]


def show(title: str, lines: list[str] | dict[str, str]) -> None:
    print(title)
    if isinstance(lines, dict):
        lines = [f"{name}: {value}" for name, value in lines.items()]
    for line in lines or ["none"]:
        print(f"  {line}")


def main(arguments: Sequence[str] | None = None) -> None:
    command_line.info().parse_args(arguments)
    show("versions", versions())
    show("system", system())
    show("mps device", mps())
    devices = ["cpu"] + (["mps"] if torch.backends.mps.is_available() else [])
    show("chunked against recurrent", {device: agreement(device) for device in devices})
    show("self-test of kernels", self_tested())
    show("ops", ops())
    show("kernels compiled in this process", pipelines())
