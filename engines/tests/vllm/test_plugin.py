"""Tests what the plugin decides in vLLM before an engine starts: platform, configuration, registrations."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode

from engines.tests.vllm.conftest import run_engine
from tests.helpers.small_models import config_of, model_of
from torch_gdn.quantized import configuration

OTHER_PLATFORM = "vllm.platforms.interface.UnspecifiedPlatform"


def other_plugin() -> str:
    """The entry point of another platform, as vllm-metal has one."""
    return OTHER_PLATFORM


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    """The plugin on vLLM's CPU platform, as in an engine's processes."""
    from torch_gdn_engines.vllm import register

    register()
    register()  # vLLM may load its plugins again in a process


def resolved(
    monkeypatch: pytest.MonkeyPatch, mode: str, has_mps: bool, version: str = "0.32.0", plugins: tuple[str, ...] = ()
) -> str:
    """Returns the platform that vLLM's own resolver makes. `plugins` are those other than torch_gdn's."""
    import vllm.platforms

    from torch_gdn_engines.vllm import versions

    group = "vllm.platform_plugins"
    points = [importlib.metadata.EntryPoint(name, f"{__name__}:other_plugin", group) for name in plugins]
    (ours,) = {*importlib.metadata.entry_points(group=group, name="torch_gdn")}
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: [*points, ours])
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: has_mps)
    monkeypatch.setattr(versions, "version_of_vllm", lambda: version)
    monkeypatch.setattr(vllm.platforms, "_current_platform", None)
    monkeypatch.setenv("TORCH_GDN_VLLM", mode)
    return type(vllm.platforms.current_platform).__name__


@pytest.mark.parametrize(
    "mode, has_mps, platform",
    [
        ("auto", True, "MpsPlatform"),
        ("auto", False, "CpuPlatform"),
        ("mps", True, "MpsPlatform"),
        ("cpu", True, "CpuPlatform"),
        ("off", True, "CpuPlatform"),
    ],
)
def test_vllm_resolves_the_platform(mode: str, has_mps: bool, platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolved(monkeypatch, mode, has_mps) == platform


@pytest.mark.parametrize(
    "mode, has_mps, version, error",
    [
        ("mps", False, "0.32.0", "TORCH_GDN_VLLM=mps: this PyTorch has no mps device"),
        ("metal", True, "0.32.0", "TORCH_GDN_VLLM: expected one of auto, mps, cpu, off, got 'metal'"),
        ("auto", True, "0.31.2", r"was checked with vLLM .*, not with 0\.31\.2: install one of those"),
        ("mps", True, "0.34.0", r"was checked with vLLM .*, not with 0\.34\.0: install one of those"),
    ],
)
def test_vllm_does_not_fall_back_to_the_cpu(
    mode: str, has_mps: bool, version: str, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM swallows what a platform's entry point raises, and takes its CPU platform."""
    with pytest.raises((RuntimeError, ValueError), match=error):
        resolved(monkeypatch, mode, has_mps, version)


@pytest.mark.parametrize(
    "allowed, platform",
    [
        (None, "UnspecifiedPlatform"),
        ("metal,torch_gdn", "UnspecifiedPlatform"),
        ("metal", "UnspecifiedPlatform"),
        ("torch_gdn", "MpsPlatform"),
    ],
)
def test_beside_another_platform(
    allowed: str | None, platform: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM refuses to start with two: auto leaves it to the other one unless VLLM_PLUGINS chooses."""
    if allowed is not None:
        monkeypatch.setenv("VLLM_PLUGINS", allowed)
    with caplog.at_level(logging.WARNING):
        assert resolved(monkeypatch, "auto", True, plugins=("metal",)) == platform
    said = [record.getMessage() for record in caplog.records if record.name.startswith("torch_gdn")]
    both = allowed in (None, "metal,torch_gdn")
    assert [("metal" in each, "VLLM_PLUGINS=torch_gdn" in each) for each in said] == [(True, True)] * both


def test_mps_is_not_replaced_by_another_platform_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM_TARGET_DEVICE=cpu has vLLM choose its CPU platform without asking a plugin."""
    from torch_gdn_engines.vllm import register

    monkeypatch.setenv("TORCH_GDN_VLLM", "mps")
    with pytest.raises(RuntimeError, match=r"expected vLLM on mps, got CpuPlatform: unset VLLM_TARGET_DEVICE"):
        register.__wrapped__()


def test_nothing_is_changed_on_another_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm-metal's says that its device type is cpu, and may be made for another version of vLLM."""
    import vllm.platforms

    from torch_gdn_engines.vllm import register, versions

    class OtherPlatform(vllm.platforms.interface.Platform):
        _enum = vllm.platforms.interface.PlatformEnum.OOT
        device_type = "cpu"

    monkeypatch.setattr(vllm.platforms, "_current_platform", OtherPlatform())
    monkeypatch.setattr(versions, "version_of_vllm", lambda: "0.27.1")
    register.__wrapped__()


@pytest.mark.parametrize("order", list(itertools.permutations([None, "8v4", "4v4"])), ids=str)
@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_engines_of_one_process_have_their_own_schemes(
    device: str, order: tuple[str | None, ...], request: pytest.FixtureRequest
) -> None:
    """vLLM caches the backend by what it selects it by, which is not additional_config."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.v1.attention.selector import get_attn_backend
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from torch_gdn.aura import Scheme

    if device == "mps":
        request.getfixturevalue("mps")
    backends = []
    for scheme in (*order, *order):
        config = VllmConfig(additional_config={"aura": scheme} if scheme else {})
        with set_current_vllm_config(config):
            backends.append(get_attn_backend(head_size=64, dtype=torch.float32, kv_cache_dtype="auto"))
    assert backends[:3] == backends[3:] and len(set(backends)) == 3
    plain = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float32)
    for scheme, backend in zip(order, backends, strict=False):
        size = 2 * 64 * 4 if scheme is None else Scheme(scheme).bytes_per_token(64)
        assert backend.customize_spec(plain).page_size_bytes == 16 * 2 * size
        assert getattr(backend.get_impl_cls(), "scheme", None) == (scheme and Scheme(scheme))


def test_two_schemes_for_one_engine_are_refused() -> None:
    from torch_gdn_engines.vllm import kv_cache_dtype

    config = SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype="aura_8v4"), additional_config={"aura": "4v4", "other": 1}
    )
    with pytest.raises(ValueError, match="kv_cache_dtype: expected aura_4v4 like additional_config, got aura_8v4"):
        kv_cache_dtype.move_to_additional_config(config)
    config.cache_config.cache_dtype = "aura_4v4"
    kv_cache_dtype.move_to_additional_config(config)
    assert (config.cache_config.cache_dtype, config.additional_config) == ("auto", {"aura": "4v4", "other": 1})


def verified(written: dict[str, Any], mps: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The method by which vLLM would load a file with this quantization_config on mps."""
    import vllm.config.model
    from vllm.config import VllmConfig
    from vllm.model_executor.layers import quantization

    from torch_gdn_engines.vllm import quantized

    monkeypatch.setattr(quantization, "QUANTIZATION_METHODS", [*quantization.QUANTIZATION_METHODS])
    monkeypatch.setattr(quantization, "_CUSTOMIZED_METHOD_TO_QUANT_CONFIG", {})
    quantized.register()
    model = SimpleNamespace(
        quantization=None,
        hf_config=SimpleNamespace(quantization_config=written),
        model_arch_config=SimpleNamespace(quantization_config={"quant_method": "", **written}),  # vLLM adds the key
    )
    monkeypatch.setattr(vllm.config.model, "current_platform", mps)
    config = VllmConfig()
    config.model_config = model
    vllm.config.model.ModelConfig._verify_quantization(model)
    mps.check_and_update_config(config)
    return quantization.get_quantization_config(model.quantization)


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "packing_format": "auto_round:auto_gptq"}
CODES = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"0": {"targets": ["Linear"], "weights": CODES}},
}
MLX = {"bits": 4, "group_size": 64}


@pytest.mark.parametrize(
    "written", [GPTQ, AWQ, AUTO_ROUND, COMPRESSED, MLX], ids=lambda x: x.get("quant_method", "mlx")
)
def test_quantised_files_are_recognised_on_mps(
    written: dict[str, Any], mps: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert verified(written, mps, monkeypatch).__module__.startswith("torch_gdn_engines.")


@pytest.mark.parametrize(
    "written, got",
    [
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "fp8 of e4m3 with weight_block_size None"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt_fp4"),
        ({"mode": "affine"}, "a quantization_config without a quant_method"),
        ({**MLX, "mode": "nvfp4"}, "MLX's mode nvfp4"),
        ({**AUTO_ROUND, "act_bits": 8}, "AutoRound's int of 4 bits"),
    ],
    ids=str,
)
def test_other_quantised_files_are_refused_on_mps(
    written: dict[str, Any], got: str, mps: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """engines/tests/test_packed_engines.py has all refusals. These come from vLLM's names of methods, too."""
    with pytest.raises(
        ValueError, match=rf"quantization: expected weights of bfloat16.* on mps, got {got}$|{got} with"
    ):
        verified(written, mps, monkeypatch).from_config(written)


SHAPES = {"qweight": (16, 64), "qzeros": (4, 8), "scales": (4, 64)}  # of 64 rows and 128 columns


def test_rows_that_do_not_fill_words_are_refused() -> None:
    from torch_gdn_engines.packed_methods import check_rows

    packing = configuration.read(GPTQ).packing("a.b", SHAPES, 128)
    check_rows("a.b", packing, [56, 8])
    with pytest.raises(ValueError, match=r"^a\.b: expected .* row counts are multiples of 8, got \[64, 4\]"):
        check_rows("a.b", packing, [64, 4])


def method_of(kind: Any, *names: str, **shapes: Any) -> Any:
    """Returns the method of a layer whose files have these tensors, and a g_idx."""
    tensors = SHAPES | {"g_idx": (128,)} | shapes
    return kind(configuration.read(GPTQ), "a.b", dict.fromkeys(names, tensors))


@pytest.mark.parametrize("missing", ["scales", "qzeros"])
def test_tensors_that_a_file_lacks_are_missed(missing: str) -> None:
    """Scales are float32 whatever the model's dtype: a file's are often float16."""
    from torch_gdn_engines.packed_methods import Linear, empty

    method, default = method_of(Linear, "a.b"), torch.get_default_dtype()
    packing = method.packing_of(["a.b"], 128)
    try:
        torch.set_default_dtype(torch.bfloat16)
        tensors = {each.name: empty(each, *each.shape(64, 128, packing)) for each in packing.tensors}
    finally:
        torch.set_default_dtype(default)
    assert tensors["scales"].dtype == torch.float32
    for each in packing.tensors:
        load = method.loading(each, each.name, lambda param, loaded: param.fill_(loaded), lambda: 64)
        if each.name != missing:
            load(tensors[each.name], 1)
    with pytest.raises(ValueError, match=rf"^a\.b: expected finite {missing} for all groups, which"):
        method.convert(packing, tensors)


@pytest.mark.parametrize(
    "scale, dtypes",
    [
        (torch.tensor(0.1).half(), (torch.float16, torch.uint8)),
        (torch.tensor(1e-30).bfloat16(), (torch.bfloat16, torch.uint8)),
        (torch.tensor(0.1), (torch.float32, torch.float32)),
    ],
)
def test_scales_have_16_bits_where_exact(scale: torch.Tensor, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    from torch_gdn_engines.packed_methods import Linear, empty

    method = method_of(Linear, "a.b")
    packing = method.packing_of(["a.b"], 128)
    tensors = {each.name: empty(each, *each.shape(64, 128, packing)).fill_(float(scale)) for each in packing.tensors}
    packed = method.convert(packing, tensors)
    assert packed.dtypes == dtypes
    assert torch.equal(packed.scales.float(), torch.full((64, 4), float(scale)))


def test_groups_of_a_fused_layer_must_agree() -> None:
    """One gather of x's columns serves all of its matrices."""
    from torch_gdn_engines.packed_methods import Linear

    method = method_of(Linear, "a.b")
    groups, stored = torch.tensor([1, 0, 1, 0], dtype=torch.int32), torch.full((4,), -1, dtype=torch.int32)
    method.load_groups(stored, groups)
    method.load_groups(stored, groups)
    assert torch.equal(stored, groups)
    for other in (groups.flip(0), groups[:2]):
        with pytest.raises(ValueError, match=r"^a\.b: expected the same g_idx of 4 columns for all matrices"):
            method.load_groups(stored, other)


@pytest.mark.parametrize(
    "name, shape, error",
    [
        ("w2_bias", (128,), r"expected experts without biases on mps, got experts\.0\.w2_bias"),
        ("w2_g_idx", [1, 0], r"expected experts without act-order \(desc_act\) on mps, got experts\.0\.w2_g_idx"),
        ("w2_scales", (3, 128), r"expected experts\.0\.w2_scales of shape \(2, 128\), got \(3, 128\)"),
        ("w13_scales", (3, 16), r"expected experts\.0\.w13_scales of shape \(4, 64\), got \(3, 16\)"),
    ],
)
def test_tensors_of_experts_that_do_not_fit_are_refused(name: str, shape: Any, error: str) -> None:
    from torch_gdn_engines.packed_methods import Experts

    method = method_of(Experts, "gate", "up", "down")
    method.matrices["down"] = {"qweight": (8, 128), "qzeros": (2, 16), "scales": (2, 128)}
    layer = torch.nn.Module()
    method.create_weights(layer, 1, 128, 64)
    parameter = getattr(layer, name)
    with pytest.raises(ValueError, match=rf"^a\.b: {error}"):
        parameter.weight_loader(
            param=parameter,
            loaded_weight=torch.ones(shape) if isinstance(shape, tuple) else torch.tensor(shape),
            weight_name=f"experts.0.{name}",
            shard_id="w2" if name.startswith("w2") else "w1",
            expert_id=0,
        )


@pytest.mark.parametrize(
    "config, got",
    [
        (SimpleNamespace(model_type="llama"), r"llama \(supported text models: qwen3"),
        (
            SimpleNamespace(model_type="qwen3_5_moe", vision_config={}),
            r"""qwen3_5_moe with a vision part; .*--hf-overrides '{"architectures": \["Qwen3_5MoeForCausalLM"\]}'$""",
        ),
    ],
)
def test_mlx_files_of_other_models_are_refused(config: Any, got: str) -> None:
    from torch_gdn_engines.vllm.mlx_files import PackedMLXConfig

    with pytest.raises(ValueError, match=f"got an MLX file of {got}"):
        PackedMLXConfig.from_config(MLX).maybe_update_config("model", config)


def test_adapters_of_models_with_experts_are_refused() -> None:
    from vllm.config import LoRAConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    from torch_gdn_engines.vllm.layers import check_experts

    experts = SimpleNamespace(activation=MoEActivation.SILU, has_bias=False)
    config = VllmConfig()
    with set_current_vllm_config(config):
        check_experts(experts)
        config.lora_config = LoRAConfig(max_lora_rank=8)
        with pytest.raises(NotImplementedError, match="LoRA on mps: expected a model without experts"):
            check_experts(experts)


@pytest.mark.parametrize(
    "convolution, asked, states",
    [("auto", "auto", "float32"), ("auto", "bfloat16", "bfloat16"), ("float16", "auto", "auto")],
)
def test_states_are_float32_on_mps_unless_asked_otherwise(convolution: str, asked: str, states: str, mps: Any) -> None:
    """States are float32 as in transformers, while vLLM's auto means the model's dtype."""
    from vllm.config import VllmConfig

    config = VllmConfig()
    config.cache_config.mamba_cache_dtype, config.cache_config.mamba_ssm_cache_dtype = convolution, asked
    mps.check_and_update_config(config)
    assert config.cache_config.mamba_ssm_cache_dtype == states


@pytest.mark.parametrize(
    ("asked", "gibibytes", "share"),
    [(0.92, 8, 0.7), (0.92, 23.5, 0.7), (0.92, 24, 0.92), (0.5, 8, 0.5)],
)
def test_the_default_share_of_a_small_memory(
    asked: float, gibibytes: float, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch_gdn_engines.vllm import worker

    sizes = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": int(gibibytes * 2**18)}
    monkeypatch.setattr(worker.os, "sysconf", sizes.__getitem__)
    assert worker.share_of_memory(asked) == share


def test_pools_fit_into_buffers() -> None:
    """12 linear and 4 full layers share 4 tensors."""
    from torch_gdn_engines.vllm.worker import pools_in_buffers

    assert pools_in_buffers([12, 4], 1000) == 4000
    assert pools_in_buffers([], 1000) == 1000


@pytest.mark.parametrize("tail", [128, 127, 0], ids=["means", "no means", "no tail"])
def test_pools_leave_memory_for_what_vllm_does_not_know(tail: int, mps: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact rows and means fit next to the pools, with less than a block to spare."""
    from vllm.config import VllmConfig

    from torch_gdn_engines.vllm import aura_attention, ring_buffers, worker

    own = object.__new__(worker.MpsWorker)
    own.vllm_config = config = VllmConfig(additional_config={"aura": "4v4", "aura_tail": tail, "aura_sinks": 0})
    config.model_config = SimpleNamespace(dtype=torch.bfloat16)
    own.cache_config = config.cache_config
    config.cache_config.gpu_memory_utilization = 0.5
    impl = aura_attention.backend_of("4v4").implementation(4, 128, 1.0, 2)
    layer = SimpleNamespace(impl=impl)
    config.compilation_config.static_forward_context["0"] = layer
    own.model_runner = SimpleNamespace(profile_run=lambda: None)
    own.get_kv_cache_spec = lambda: {"0": "layer"}
    monkeypatch.setattr(worker._C, "device_facts", lambda: {"max_buffer_length": 1 << 40}, raising=False)
    sizes = {"recommended_max_memory": 1 << 30, "driver_allocated_memory": 1 << 20}
    for name in ("synchronize", "empty_cache", *sizes):
        monkeypatch.setattr(torch.mps, name, lambda name=name: sizes.get(name))
    given = own.determine_available_memory()
    block = impl.scheme.bytes_per_token(128) * 2 * 128
    layer.kv_cache = torch.empty(given // block, 2, 128, block // 256, dtype=torch.uint8, device="meta")
    ring_buffers.allocate(config, torch.device("meta"))
    extra = [] if impl.exact is None else [impl.exact.keys, impl.exact.values]
    extra += [] if impl.tile_means is None else [impl.tile_means]
    assert len(extra) == {128: 3, 127: 2, 0: 0}[tail]
    left = (1 << 29) - (1 << 20) - given - sum(x.nbytes for x in extra)
    assert 0 <= left <= block


@pytest.mark.parametrize("name", ["CpuPlatform", "MpsPlatform"])
def test_kernels_are_registered_whatever_was_imported(name: str) -> None:
    """vLLM's registry walks over the objects of all modules; n-gram drafts import numba, whose llvmlite has one that
    claims to have every attribute. A second engine of the process registers again."""
    import llvmlite.binding  # noqa: F401
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.sample import rejection_sampler

    from torch_gdn_engines.vllm.mps_platform import MpsPlatform

    platform = object.__new__({"CpuPlatform": CpuPlatform, "MpsPlatform": MpsPlatform}[name])
    platform.register_triton_kernel_overrides()
    first = rejection_sampler.expand_kernel
    platform.register_triton_kernel_overrides()
    assert rejection_sampler.expand_kernel is first
    temperatures = rejection_sampler.expand_batch_to_tokens(torch.tensor([0.0, 0.5]), torch.tensor([1, 3]), 3, 0, 1)
    assert temperatures.tolist() == [1.0, 0.5, 0.5]


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
@pytest.mark.parametrize("name", ["RMSNorm", "GemmaRMSNorm"])
def test_norms_on_the_cpu_are_replaced_beside_gated_delta_net_alone(name: str, family: str) -> None:
    from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers import layernorm

    config = VllmConfig(compilation_config=CompilationConfig(mode=0, custom_ops=["all"]))
    config.model_config = SimpleNamespace(hf_text_config=config_of(family))
    with set_current_vllm_config(config), torch.no_grad(), Operators() as operators:
        getattr(layernorm, name)(64)(torch.ones(2, 64), torch.ones(2, 64))
    assert any(each.startswith("gdn.rms_norm") for each in operators.names) == (family == "qwen3_5")


@pytest.mark.parametrize("sections", [None, [3, 3, 2]], ids=["one position", "three positions"])
@pytest.mark.parametrize("rotary_dim", [16, 32])
def test_rotation_is_that_of_vllm(rotary_dim: int, sections: list[int] | None) -> None:
    """Rotates some of 32 elements, or all. q is part of a projection. With sections a token has three positions."""
    from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding

    from torch_gdn_engines.vllm import rotary

    theirs, ours = RotaryEmbedding, rotary.TorchGdnRotaryEmbedding
    options: dict[str, Any] = {}
    if sections is not None:
        theirs, ours = MRotaryEmbedding, rotary.TorchGdnMRotaryEmbedding
        options = {"mrope_section": [n * rotary_dim // 16 for n in sections], "mrope_interleaved": True}
    with set_current_vllm_config(VllmConfig(compilation_config=CompilationConfig(mode=0, custom_ops=["all"]))):
        own = object.__new__(ours)
        ours.__init__(own, 32, rotary_dim, 64, 10000.0, True, torch.float32, **options)
    torch.manual_seed(0)
    projection, key = torch.randn(5, 4 * 32 + 8), torch.randn(5, 64)
    query = projection[:, 8:]
    positions = torch.randint(0, 64, (5,) if sections is None else (3, 5))
    expected = theirs.forward_native(own, positions, query, key)
    with Operators() as operators:
        result = own.forward_oot(positions, query, key)
    assert "gdn.qk_norm_rope.default" in operators.names
    for x, other in zip(result, expected, strict=True):
        assert x.shape == other.shape and (x - other).abs().max() < 2e-6 and other.std() > 0.5


def test_torch_keeps_its_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's runner on mps sees others; threads of the same process that use torch's do not."""
    from vllm.v1.spec_decode import ngram_proposer_gpu
    from vllm.v1.worker import gpu_model_runner

    from torch_gdn_engines.vllm import compat

    def names(torch: Any) -> list[Any]:
        cuda = torch.cuda
        return [torch.Event, cuda.Event, cuda.Stream, cuda.current_stream, cuda.stream]

    own = names(torch)
    modules = [gpu_model_runner, ngram_proposer_gpu]
    for module in modules:
        monkeypatch.setattr(module, "torch", torch)
    compat.replace(compat.streams())
    assert names(torch) == own
    for module in modules:
        assert not set(names(module.torch)) & set(own)
        assert module.torch.float32 is torch.float32 and module.torch.cuda.Event is module.torch.Event


def test_a_model_that_does_not_fit_is_refused_before_it_is_read(
    mps: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch_gdn_engines.vllm.worker import MpsWorker

    save_file({"weight": torch.zeros(1000)}, tmp_path / "model.safetensors")
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 1999)
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: 0)
    worker = object.__new__(MpsWorker)
    worker.model_config = SimpleNamespace(model=str(tmp_path), dtype=torch.bfloat16)
    worker.load_config = SimpleNamespace(load_format="auto")
    worker.device = torch.device("mps")
    with pytest.raises(torch.OutOfMemoryError, match=r"^the weights in .+ Metal recommends at most"):
        worker.load_model()


def test_a_step_copies_little_to_the_device_where_the_kernels_are_tested(tmp_path: Path) -> None:
    """Counts copies for prompts and for later tokens. The self-test passes for every kernel that the model needs."""
    texts = [list(range(1, 20)), list(range(3, 40))]
    scenario = {
        "model": str(model_of("qwen3_next", tmp_path)),
        "options": {},
        "rounds": [{"prompts": texts, "tokens": 4}],
    }
    variables = {"TORCH_GDN_SELF_TEST": "auto", "TORCH_GDN_TUNING_CACHE": str(tmp_path / "table.json")}
    result = run_engine("mps", scenario, variables=variables)
    assert len(result["copies per step"]) == 4 and max(result["copies per step"]) <= 3
    [verdicts] = tmp_path.glob("self_test_*.json")
    tested = json.loads(verdicts.read_text())["verdicts"].values()
    assert {"gdn_decode_", "chunk_gated_delta_rule_", "paged_attention_"} <= {each["op"] for each in tested}
    assert not [each for each in tested if each["problem"]]


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_the_size_of_blocks_stays_once_pools_exist(device: str, request: pytest.FixtureRequest) -> None:
    """vLLM's EngineCore checks its configuration again at the end of its start."""
    from vllm.config import VllmConfig
    from vllm.platforms import current_platform

    platform, config = request.getfixturevalue("mps") if device == "mps" else current_platform, VllmConfig()
    platform.check_and_update_config(config)
    assert config.cache_config.block_size in (32, 128)
    config.cache_config.block_size, config.cache_config.num_gpu_blocks = 80, 7
    platform.check_and_update_config(config)
    assert config.cache_config.block_size == 80
