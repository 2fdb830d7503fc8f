"""Tests what the plugin's classes do with rows of padding, changed layers, and configurations that are refused."""

from __future__ import annotations

import contextlib
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.small_models import config_of
from torch_gdn.integrations import plain


def test_attention_clears_the_rows_of_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_gdn_engines.vllm.attention import PagedAttention

    attention: Any = PagedAttention(2, 16, 0.25)
    monkeypatch.setattr(attention, "attend", lambda layer, q, k, v, cache, m, out: out.fill_(1))
    out, query = torch.full((5, 2, 16), torch.nan), torch.zeros(5, 2, 16)
    attention.forward(None, query, None, None, torch.empty(0), SimpleNamespace(num_actual_tokens=3), out)
    assert (out[:3] == 1).all() and (out[3:] == 0).all()


def derive(module: Any) -> None:
    module.__class__ = type("Norm", (type(module),), {})


CHANGED = {
    "nothing": lambda layer: None,
    "a hook of a norm": lambda layer: layer.k_norm.register_forward_hook(lambda *_: None),
    "another class of a norm": lambda layer: derive(layer.q_norm),
    "a hook of the rotation": lambda layer: layer.rotary_emb.register_forward_pre_hook(lambda *_: None),
    "another rotation": lambda layer: setattr(layer, "rotary_emb", torch.nn.Identity()),
    "another eps": lambda layer: setattr(layer.k_norm, "variance_epsilon", 1e-3),
    "no gate": lambda layer: setattr(layer, "attn_output_gate", False),
}


def made(owner: Any, *arguments: Any) -> Any:
    plain.learn(owner)
    result = object.__new__(owner)  # vLLM's own __new__ would choose the class
    owner.__init__(result, *arguments)
    return result


@pytest.mark.parametrize("change", CHANGED)
def test_an_attention_that_was_changed_is_vllms(change: str) -> None:
    from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config

    from torch_gdn_engines.vllm import layers, rotary

    config = VllmConfig(compilation_config=CompilationConfig(mode=0, custom_ops=["all"]))
    config.model_config = SimpleNamespace(hf_text_config=config_of("qwen3_5"))
    with set_current_vllm_config(config):
        norms = [made(layers.TorchGdnGemmaRMSNorm, 32) for _ in range(2)]
        rotation = made(rotary.TorchGdnRotaryEmbedding, 32, 16, 64, 10000.0, True, torch.float32)
    layer = SimpleNamespace(q_norm=norms[0], k_norm=norms[1], rotary_emb=rotation, attn_output_gate=True)
    CHANGED[change](layer)
    assert rotary.is_taken(layer, torch.arange(3)) == (change == "nothing")


@pytest.mark.parametrize("change", ["nothing", "another class", "a hook"])
def test_a_gated_norm_that_was_changed_is_vllms(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config

    from torch_gdn_engines.vllm import layers

    with set_current_vllm_config(VllmConfig(compilation_config=CompilationConfig(mode=0, custom_ops=["all"]))):
        norm = made(layers.TorchGdnRMSNormGated, 32)
    if change != "nothing":
        derive(norm) if change == "another class" else norm.register_forward_hook(print)
    context = SimpleNamespace(attn_metadata={"layer": 1})
    monkeypatch.setattr(layers, "get_forward_context", lambda: context)
    monkeypatch.setattr(layers, "current_platform", SimpleNamespace(is_out_of_tree=lambda: True))
    monkeypatch.setattr(layers, "state_of", id)
    monkeypatch.setattr(layers.gated_delta_net, "decode", lambda *_: "ours")
    layer: Any = SimpleNamespace(norm=norm, prefix="layer", gqa_interleaved_layout=True)
    assert layers.decode(layer, torch.empty(0), torch.empty(0)) == ("ours" if change == "nothing" else None)


def divided(by: str) -> Any:
    from vllm.config import VllmConfig

    config: Any = VllmConfig()
    config.parallel_config.world_size = 2
    setattr(config.parallel_config, by, 2)
    return config


def test_drafts_in_a_pipeline_are_refused(mps: Any) -> None:
    config = divided("pipeline_parallel_size")
    config.speculative_config = SimpleNamespace(method="mtp")
    expected = "^speculative_config: expected none with pipeline_parallel_size 2 on mps, got mtp$"
    with pytest.raises(ValueError, match=expected):
        mps.check_and_update_config(config)


@pytest.mark.parametrize("quantization", ["fp8", None])
def test_packed_weights_are_not_cut(quantization: str | None, mps: Any) -> None:
    config = divided("tensor_parallel_size")
    config.model_config = SimpleNamespace(quantization=quantization)
    expected = (
        r"^tensor_parallel_size: expected 1 for packed weights \(fp8\) on mps, got 2: use pipeline_parallel_size 2$"
    )
    with pytest.raises(ValueError, match=expected) if quantization else contextlib.nullcontext():
        mps.check_division(config)


def test_ray_is_refused(mps: Any) -> None:
    config = divided("pipeline_parallel_size")
    config.parallel_config.distributed_executor_backend = "ray"
    with pytest.raises(ValueError, match=r"^distributed_executor_backend: expected mp on mps, got ray: use --nnodes"):
        mps.check_processes(config.parallel_config)


def test_machines_of_different_sizes_have_the_same_defaults(mps: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.engine import arg_utils

    from torch_gdn_engines.vllm import compat

    owner = arg_utils.EngineArgs
    monkeypatch.setattr(owner, "get_batch_defaults", owner.__dict__["get_batch_defaults"])  # to put it back
    monkeypatch.setattr(arg_utils, "current_platform", mps)
    monkeypatch.setattr(torch.backends.mps, "get_name", lambda: "Apple M4 Max")
    compat.replace_on_mps()
    alone, together = [], []
    for gigabytes in (48, 96):
        monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda size=gigabytes: size << 30)
        alone.append(owner.get_batch_defaults(1))
        together.append(owner.get_batch_defaults(2))
    assert alone[0] != alone[1] and together == [alone[0]] * 2


LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
ADDRESS = "expected this machine's address on the private network, got "


@pytest.mark.parametrize(
    "interface, own, first, error",
    [
        (
            "",
            "127.0.0.1",
            "127.0.0.1",
            rf"GLOO_SOCKET_IFNAME: expected .*, one of .*{LOOPBACK}.*, got none",
        ),
        ("bridge99", "127.0.0.1", "127.0.0.1", "GLOO_SOCKET_IFNAME: expected the interface .*, got bridge99"),
        (LOOPBACK, "", "127.0.0.1", f"VLLM_HOST_IP: {ADDRESS}none"),
        (LOOPBACK, "192.0.2.1", "127.0.0.1", rf"VLLM_HOST_IP: {ADDRESS}192\.0\.2\.1"),
        (LOOPBACK, "127.0.0.1", "192.0.2.1", rf"master_addr: {ADDRESS}192\.0\.2\.1"),
    ],
)
def test_a_network_that_a_machine_does_not_have_is_refused(
    interface: str, own: str, first: str, error: str, mps: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    monkeypatch.setenv("VLLM_HOST_IP", own)
    parallel = SimpleNamespace(distributed_executor_backend="mp", nnodes=2, node_rank=0, master_addr=first)
    with pytest.raises(ValueError, match=error):
        mps.check_processes(parallel)


@pytest.mark.parametrize("waits", ["wait_until_ready", "dequeue"])
def test_a_shutdown_ends_the_wait_for_another_machine(waits: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other machine has ended before it connects or writes."""
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    from torch_gdn_engines.vllm import compat

    for name in ("wait_until_ready", "dequeue"):
        monkeypatch.setattr(MessageQueue, name, getattr(MessageQueue, name))  # to be restored
    compat.replace_on_mps()
    queue, ends = MessageQueue(1, 0, connect_ip="127.0.0.1"), []
    if waits == "dequeue":
        queue = MessageQueue.create_from_handle(queue.export_handle(), 0)

    def wait() -> None:
        try:
            getattr(queue, waits)()
        except RuntimeError as error:
            ends.append(str(error))

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    queue.shutdown()
    waiting.join(30)
    assert ends == ["a process of this engine has ended"]
