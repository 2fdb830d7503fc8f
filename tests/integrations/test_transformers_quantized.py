"""Tests models in quantised files on mps: packed layers compute what dense layers of the same numbers do."""

from __future__ import annotations

import copy
import gc
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import torch_gdn
from tests.helpers.decoded import measured
from tests.helpers.devices import kernels_run, ready
from tests.helpers.errors import assert_close
from tests.helpers.packed_models import float8
from tests.helpers.wide import assert_little_is_held, write_wide_model
from tests.integrations.models import random_model, random_tokens, torch_gdn_enabled
from tests.integrations.serving import alone, prompts_of, served
from torch_gdn.integrations.transformers import versions
from torch_gdn.integrations.transformers.packed_layers import PackedEmbedding, PackedExperts, PackedLinear
from torch_gdn.integrations.transformers.small_models import make as convolving_model

pytest.importorskip("mlx.core", reason="the files are written with MLX, which is installed on Linux and on macOS alone")
if not versions.is_served(versions.installed()):
    pytest.skip("this transformers loads quantised files in another way", allow_module_level=True)
from tests.integrations import quantized_files
from tests.integrations.quantized_files import FORMATS, gptq_config, is_protected

SPARSE = {"num_experts": 4, "num_experts_per_tok": 2}
LINEAR, DENSE, NEXT, MIXTURE = "model.layers.0.linear_attn", "qwen3_5", "qwen3_next", "qwen3_5_moe"
PROMPT = 12
CASES = [
    *((DENSE, form) for form in ("mlx", *FORMATS)),
    *((MIXTURE, form) for form in ("mlx", "mlx mxfp4", "gptq_v2", "awq", "w4a16", "fp8", "float-channel", "mxfp4")),
    *((NEXT, form) for form in ("mlx", "gptq", "auto-round", "w8a16", "fp8")),
]


@pytest.fixture(autouse=True)
def _forward_only() -> Any:
    with torch.no_grad():
        yield


def written(kind: str, folder: Path, form: str, **special: Any) -> Any:
    """Writes a file, and returns a model with its numbers."""
    model = random_model(kind, **({} if kind == DENSE else SPARSE), **special)
    if form.startswith("mlx"):
        return quantized_files.write_mlx(model, folder, mode="mxfp4" if "mxfp4" in form else "affine")
    return quantized_files.write(model, folder, form)


def load(folder: Path, dtype: torch.dtype = torch.float32, device: str = "mps") -> Any:
    from transformers import AutoModelForCausalLM

    ready("mps")
    gc.collect()  # models of other tests, whose layers count while they exist
    return AutoModelForCausalLM.from_pretrained(folder, device_map=device, dtype=dtype)


def generate(model: Any, device: str) -> list[int]:
    tokens = random_tokens(1, PROMPT).to(device)
    options = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": 5, "do_sample": False}
    result: list[int] = model.generate(input_ids=tokens, **options)[0, PROMPT:].tolist()
    return result


def loaded_as(twin: Any, folder: Path) -> Any:
    """Returns the model of the files. Asserts that it gives the tokens of the twin, which has its numbers."""
    with torch_gdn_enabled():
        model = load(folder)
        assert generate(model, "mps") == generate(twin, "cpu")
    return model


def logits(model: Any, device: str) -> Tensor:
    result: Tensor = model(input_ids=random_tokens(1, PROMPT).to(device)).logits
    return result.cpu()


def exact_logits(twin: Any) -> Tensor:
    exact = copy.deepcopy(twin).double()
    exact.set_experts_implementation("eager")
    return logits(exact, "cpu")


def edit(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    path = folder / "model.safetensors"
    changed = {name: x.contiguous() for name, x in change(load_file(path)).items()}
    save_file(changed, path, {"format": "pt"})


@pytest.mark.sweep(8)
@pytest.mark.parametrize(("kind", "form"), CASES)
def test_tokens_and_logits_are_those_of_the_numbers(kind: str, form: str, tmp_path: Path) -> None:
    twin = written(kind, tmp_path, form)
    expected = generate(twin, "cpu")
    kernels = (
        ["quantized_linear"] + ["dequantize"] * form.startswith("mlx") + ["moe_gate_up", "moe_down"] * (kind != DENSE)
    )
    with torch_gdn_enabled() as transformers:
        model = load(tmp_path)
        with kernels_run(torch.device("mps"), *kernels):
            assert generate(model, "mps") == expected
        result = logits(model, "mps")
        status = transformers.status()
        assert_layers(model, status, form)
    assert_close("logits", result, exact_logits(twin), 3e-6, head_dim=None)
    assert generate(model, "mps") == expected, "after disable() the model computes the same"


def assert_layers(model: Any, status: Any, form: str) -> None:
    """Checks that exactly the layers packed in the file are packed, and that torch_gdn has whole blocks of experts."""
    packed = {
        name for name, x in model.named_modules() if isinstance(x, (PackedLinear, PackedEmbedding, PackedExperts))
    }
    dense = {name for name, x in model.named_modules() if type(x) in (nn.Linear, nn.Embedding)}
    assert (
        not dense
        if form.startswith("mlx")
        else all(is_protected(name, model.get_submodule(name)) for name in dense - EMBEDDING)
    )
    assert status.packed == len(packed) > 5
    assert f"{len(packed)} layers with packed weights" in str(status)
    mixtures = sum(isinstance(x, PackedExperts) for x in model.modules())
    assert mixtures == (0 if model.config.model_type == "qwen3_5_text" else 2)
    assert status.ran.get("moe_block", 0) == mixtures * 6 and not status.fallbacks


EMBEDDING = {"model.embed_tokens"}


@pytest.mark.sweep(1, seeds=3)
@pytest.mark.usefixtures("serving")
def test_32_clients(tmp_path: Path) -> None:
    prompts = prompts_of(*range(2, 66, 2))
    expected = alone(written(MIXTURE, tmp_path, "awq"), prompts)
    torch_gdn.enable(continuous_batching=True)
    model = load(tmp_path)
    with kernels_run(torch.device("mps"), "quantized_linear", "moe_gate_up"):
        result = served(model, prompts, max_requests_per_batch=len(prompts))
    assert result.tokens == {f"request {n}": tokens for n, tokens in enumerate(expected)}


def test_a_head_tied_to_a_packed_embedding_is_the_same_memory(tmp_path: Path) -> None:
    twin = written(DENSE, tmp_path, "mlx", tie_word_embeddings=True)
    model = loaded_as(twin, tmp_path)
    for part in ("weight", "scales", "biases"):
        assert getattr(model.lm_head, part) is getattr(model.model.embed_tokens, part)


def test_a_file_that_does_not_fit_is_refused_before_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(DENSE, tmp_path, "mlx")
    ready("mps")
    monkeypatch.setattr(torch.mps, "recommended_max_memory", torch.mps.current_allocated_memory)
    with torch_gdn_enabled(), pytest.raises(torch.OutOfMemoryError, match=r"^the weights of \w+: .+ recommends"):
        load(tmp_path)


def test_what_the_file_leaves_dense_stays_dense(tmp_path: Path) -> None:
    """The file decides, whatever the configuration says (GPTQ's `dynamic`, `modules_to_not_convert`)."""

    def protected(name: str, module: nn.Module) -> bool:
        return is_protected(name, module) or "layers.0" in name or name.endswith("o_proj")

    twin = quantized_files.write(random_model(DENSE), tmp_path, "gptq", protected)
    model = loaded_as(twin, tmp_path)
    attention, first = model.model.layers[1].self_attn, model.model.layers[0]
    assert [type(x) for x in (attention.q_proj, attention.o_proj)] == [PackedLinear, nn.Linear]
    assert not any(isinstance(x, PackedLinear) for x in first.modules())


def test_the_text_part_of_an_mlx_file_with_a_vision_part(tmp_path: Path) -> None:
    """The configuration is that of the whole model."""
    import transformers

    twin = written(DENSE, tmp_path, "mlx")
    name = "vision_tower.blocks.0.attn.qkv"
    part = {f"{name}.weight": torch.zeros(8, 8, dtype=torch.int32).view(torch.uint32)}
    part |= {f"{name}.{ending}": torch.zeros(8, 2) for ending in ("scales", "biases")}
    edit(tmp_path, lambda tensors: tensors | part)
    text = json.loads((tmp_path / "config.json").read_text())
    whole = transformers.Qwen3_5Config(text_config=text, vision_config={"depth": 1})
    whole.quantization_config, whole.architectures = text["quantization_config"], ["Qwen3_5ForConditionalGeneration"]
    whole.save_pretrained(tmp_path)
    loaded_as(twin, tmp_path)


@pytest.mark.parametrize("form", ["gptq", "w4a16", "fp8"])
def test_wrapped_names_and_prediction_layers(form: str, tmp_path: Path) -> None:
    """Files of a whole Qwen3.5 hold the text model within another, and layers that transformers does not have."""
    twin = written(MIXTURE, tmp_path, form)
    ending = {"gptq": "qweight", "w4a16": "weight_packed", "fp8": "weight_scale_inv"}[form]

    def wrap(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        wrapped = {name.replace("model.", "model.language_model.", 1): x for name, x in tensors.items()}
        return wrapped | {f"mtp.layers.0.mlp.experts.0.up_proj.{ending}": torch.zeros(8, 8, dtype=torch.int32)}

    edit(tmp_path, wrap)
    loaded_as(twin, tmp_path)


def test_experts_under_other_names(tmp_path: Path) -> None:
    """Kimi Linear's files call them w1, w3 and w2. transformers' own conversion says which one is gate."""
    names = {".gate_proj.": ".w1.", ".up_proj.": ".w3.", ".down_proj.": ".w2."}

    def as_published(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        result = {}
        for name, x in tensors.items():
            if ".mlp.experts." in name:
                name = name.replace(".mlp.", ".block_sparse_moe.")
                for ours, theirs in names.items():
                    name = name.replace(ours, theirs)
            result[name] = x
        return result

    def protected(name: str, module: nn.Module) -> bool:
        return is_protected(name, module) or any(size % 32 for size in module.weight.shape)

    twin = quantized_files.write(convolving_model("kimi_linear"), tmp_path, "gptq", protected)
    edit(tmp_path, as_published)
    model = loaded_as(twin, tmp_path)
    assert isinstance(model.model.layers[1].mlp.experts, PackedExperts)


@pytest.mark.parametrize(("kind", "form"), [(MIXTURE, "mlx"), (MIXTURE, "w8a16"), (DENSE, "w4a16")])
def test_bfloat16(kind: str, form: str, tmp_path: Path) -> None:
    """Scales stay in half precision, because bfloat16 would round them."""
    twin = written(kind, tmp_path, form)
    with torch_gdn_enabled() as transformers:
        model = load(tmp_path, torch.bfloat16)
        result = logits(model, "mps")
        assert not transformers.status().fallbacks
    assert result.dtype == model.dtype == torch.bfloat16
    assert {x.scales.dtype for x in model.modules() if isinstance(x, PackedLinear)} == {torch.float16}
    assert_close("logits", result.float(), exact_logits(twin), 3e-2, head_dim=None)


def test_fused_experts_of_fp8(tmp_path: Path) -> None:
    """The file has all experts of a layer in one tensor, gate above up. A block of its scales holds rows of both."""
    twin = written(MIXTURE, tmp_path, "fp8")

    def fused(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        result = {name: x for name, x in tensors.items() if ".experts." not in name}
        for name, experts in twin.named_modules():
            for each in ("gate_up_proj", "down_proj") if name.endswith(".experts") else ():
                made = [float8(matrix) for matrix in getattr(experts, each).data]
                getattr(experts, each).data = torch.stack([numbers for _, numbers in made])
                result[f"{name}.{each}"] = torch.stack([x["weight"] for x, _ in made])
                result[f"{name}.{each}_scale_inv"] = torch.stack([x["weight_scale_inv"] for x, _ in made])
        return result

    edit(tmp_path, fused)
    model = loaded_as(twin, tmp_path)
    assert isinstance(model.model.layers[0].mlp.experts, PackedExperts)


def test_experts_that_an_fp8_file_has_unquantised(tmp_path: Path) -> None:
    twin = written(MIXTURE, tmp_path, "fp8")

    def as_numbers(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        result = {name: x for name, x in tensors.items() if ".experts." not in name}
        for name, experts in twin.named_modules():
            for e in range(SPARSE["num_experts"]) if name.endswith(".experts") else ():
                gate, up = experts.gate_up_proj.data[e].chunk(2)
                parts = {"gate_proj": gate, "up_proj": up, "down_proj": experts.down_proj.data[e]}
                result |= {f"{name}.{e}.{part}.weight": x.clone() for part, x in parts.items()}
        return result

    edit(tmp_path, as_numbers)
    model = loaded_as(twin, tmp_path)
    assert not isinstance(model.model.layers[0].mlp.experts, PackedExperts)
    assert isinstance(model.model.layers[1].self_attn.q_proj, PackedLinear)


def test_fp8_says_once_what_is_left_out(tmp_path: Path) -> None:
    written(DENSE, tmp_path, "fp8")
    words = "the weights stay in FP8; dynamic activations in FP8 are left out$"
    with torch_gdn_enabled(), pytest.warns(UserWarning, match=words):
        load(tmp_path)


@pytest.mark.sweep(6)
@pytest.mark.parametrize(("kind", "form"), [(DENSE, "gptq"), (MIXTURE, "awq"), (MIXTURE, "fp8")])
def test_loading_holds_little_more_than_the_file(kind: str, form: str, tmp_path: Path) -> None:
    """A layer's tensors are freed as they are converted. Layers have published widths."""
    ready("mps")
    gc.collect()
    stored = write_wide_model(tmp_path / "model", kind, form, layers=4)
    with torch_gdn_enabled():
        model, figures = measured(lambda: load(tmp_path / "model", torch.bfloat16))
    assert any(isinstance(x, PackedLinear) for x in model.modules())
    assert_little_is_held(stored, *figures)


def test_a_base_model_needs_no_head(tmp_path: Path) -> None:
    from transformers import AutoModel

    written(DENSE, tmp_path, "mlx")
    ready("mps")
    with torch_gdn_enabled():
        model = AutoModel.from_pretrained(tmp_path, device_map="mps", dtype=torch.float32)
    assert isinstance(model.embed_tokens, PackedEmbedding)
    assert not hasattr(model, "lm_head")


def test_only_mps_is_taken(tmp_path: Path) -> None:
    """On the CPU, and after disable(), transformers handles a file, and does not know MLX files."""
    written(DENSE, tmp_path, "mlx")
    with torch_gdn_enabled(), pytest.raises(ValueError, match="quant_method"):
        load(tmp_path, device="cpu")
    with pytest.raises(ValueError, match="quant_method"):
        load(tmp_path)


def test_another_version_warns_of_a_packed_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers loads it then. Here that fails, because it does not know MLX files."""
    written(DENSE, tmp_path, "mlx")
    monkeypatch.setattr(versions, "installed", lambda: "5.99.0")
    words = rf"packed weights is for transformers {versions.served()}, got 5\.99\.0: transformers loads this file"
    with torch_gdn_enabled():
        with pytest.warns(UserWarning, match=words), pytest.raises(ValueError, match="quant_method"):
            load(tmp_path)
        with warnings.catch_warnings(), pytest.raises(ValueError, match="quant_method"):
            warnings.simplefilter("error")
            load(tmp_path, device="cpu")


def write_config(folder: Path, kind: str, config: dict[str, Any]) -> None:
    """Writes a file without packed layers, whose configuration is refused."""
    quantized_files.write(random_model(kind), folder, "gptq", lambda *layer: True)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"quantization_config": config}))


def changed(kind: str, form: str, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        written(kind, folder, form)
        edit(folder, change)

    return write


def without(part: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {name: x for name, x in tensors.items() if part not in name}


def renamed(old: str, new: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {name.replace(old, new): x for name, x in tensors.items()}


REFUSALS = {
    "Marlin's layout": (
        lambda folder: write_config(folder, DENSE, gptq_config(checkpoint_format="marlin")),
        "got GPTQ with 4 bits in the format marlin",
    ),
    "a matrix of another shape": (
        changed(DENSE, "gptq", lambda tensors: {n: x.T if "q_proj.qweight" in n else x for n, x in tensors.items()}),
        r"q_proj.weight: expected qweight of shape \[8, 128\], got \[128, 8\]",
    ),
    "an unknown layer": (changed(DENSE, "gptq", renamed("down_proj", "d_proj")), r"d_proj.weight: expected a layer of"),
    "fewer experts": (
        changed(NEXT, "gptq", without("0.mlp.experts.0.down_proj")),
        "down_proj: expected each tensor of 4 experts, got 3",
    ),
    "no packed down projections": (
        changed(NEXT, "gptq", without("down_proj.qweight")),
        "down_proj: expected the tensors qweight, scales, qzeros in the files, got no qweight",
    ),
    "act-order within experts": (
        lambda folder: written(NEXT, folder, "act-order"),
        r"expected experts without act-order \(desc_act\)",
    ),
    "an MLX file of another model": (
        lambda folder: write_config(folder, "olmo_hybrid", {"bits": 4, "group_size": 32}),
        r"expected an MLX file of .*, as a text model \(AutoModelForCausalLM\), got OlmoHybridForCausalLM",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refuses(case: str, tmp_path: Path) -> None:
    write, message = REFUSALS[case]
    write(tmp_path)
    with torch_gdn_enabled(), pytest.raises(ValueError, match=message):
        load(tmp_path)
