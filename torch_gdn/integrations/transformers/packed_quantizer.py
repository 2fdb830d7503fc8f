"""A quantizer for transformers' loading, with which quantised models keep packed weights on `mps`.

The names of the tensors in the files decide what is packed, whatever the configuration ignores or overrides. A layer is
replaced before its weights are loaded, and its tensors are converted when they arrive, so that no two copies of a model
exist.
"""

import copy
import re
from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from torch_gdn.integrations.transformers.experts import form_reason
from torch_gdn.integrations.transformers.packed_layers import (
    PARTS,
    PackedEmbedding,
    PackedExperts,
    PackedLinear,
    guard_adapters,
    packed_layers,
    packed_models,
)
from torch_gdn.integrations.transformers.packed_loading import converters_of, ending_of, is_experts, others_of
from torch_gdn.memory import bytes_when_loaded, check_memory
from torch_gdn.quantized.formats import EXPERTS, Format, Packing, Sizes, shapes_in
from torch_gdn.quantized.mlx import NORMS_PLUS_ONE, VISION, shifts_norms

# For these models, the changes that mlx-lm makes to names and weights are undone.
MLX_MODELS = ("llama", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe")


Sources = dict[str, list[Sizes]]  # shapes of the files' tensors that make a parameter, by source pattern


class PackedConfig(QuantizationConfigMixin):
    """Holds a model's `quantization_config` as its file has it."""

    def __init__(self, content: dict[str, Any], method: str) -> None:
        self.quant_method = method
        self.content = content

    def to_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self.content)


class PackedQuantizer(HfQuantizer):
    """Loads a file's packed layers into layers that stay packed."""

    def __init__(self, config: PackedConfig, form: Format) -> None:
        super().__init__(config, pre_quantized=True)
        self.format = form
        self.dtype = torch.float32
        self.packings: dict[str, Packing] = {}  # by parameter
        self.dense: set[str] = set()  # parameters that are dequantised when loaded
        self.norms_are_shifted = False
        self.files: list[str] = []

    # ---- before loading --------------------------------------------------------------------------------------------

    def update_device_map(self, device_map: Any) -> dict[str, Any]:
        return {"": "mps"} if isinstance(device_map, str) else device_map

    def _process_model_before_weight_loading(
        self, model: Any, dtype: Any = None, checkpoint_files: Any = None, **unused: Any
    ) -> None:
        self.dtype = dtype if isinstance(dtype, torch.dtype) else torch.get_default_dtype()
        shapes, self.files = shapes_in(checkpoint_files), checkpoint_files
        needed = bytes_when_loaded(checkpoint_files, self.dtype)
        check_memory(f"the weights of {type(model).__name__}", needed, torch.device("mps"))
        if self.format.method == "mlx":
            self.expect_mlx_model(model, shapes)
        self.replace_all(model, shapes, get_model_conversion_mapping(model, None, self))
        self.tie(model)

    def replace_all(self, model: Any, shapes: dict[str, Sizes], conversions: list[Any]) -> None:
        """Puts packed layers where the files have packed tensors, given what loading does with names."""
        targets = self.targets(model, shapes, conversions)
        names = dict(model.named_parameters(remove_duplicate=False))
        for name, sources in targets.items():
            if name not in names:
                if is_unused(model, name):
                    continue
                raise ValueError(f"{name}: expected a layer of {type(model).__name__} for these packed tensors")
            shape = names[name].shape
            self.packings[name] = self.packing(name, sources, shape)
            if len(shape) == 3:
                self.expect_experts(name, sources, shape[0])
        for name in (x for x in targets if x in self.packings):
            self.replace(model, name)
        packed_models.add(model)

    def targets(self, model: Any, shapes: dict[str, Sizes], conversions: list[Any]) -> dict[str, Sources]:
        """Returns the parameters that the files have packed, by name."""
        renamings = [x for x in conversions if isinstance(x, WeightRenaming)]
        converters = [x for x in conversions if isinstance(x, WeightConverter)]
        state, prefix = model.state_dict(), model.base_model_prefix
        targets: dict[str, Sources] = {}
        for key, shape in shapes.items():
            name, source = rename_source_key(key, renamings, converters, prefix, state)
            if source is not None and ending_of(source) in self.format.endings:
                targets.setdefault(name, {}).setdefault(source, []).append(shape)
        # MLX uses the same tensor name for packed and unpacked weights. A layer with scales is packed.
        return {name: sources for name, sources in targets.items() if {ending_of(x) for x in sources} - {"weight"}}

    def packing(self, name: str, sources: Sources, shape: torch.Size) -> Packing:
        """Returns how the files pack a parameter. Its projections are alike, or `joined` refuses them."""
        own = {ending_of(source): shapes[0] for source, shapes in reversed(sources.items())}
        is_half = name.endswith("gate_up_proj") and not are_fused(sources)
        return self.format.packing(name, own, shape[-1], shape[-2] // (2 if is_half else 1))

    def expect_experts(self, name: str, sources: Sources, experts: int) -> None:
        counts = {len(shapes) for shapes in sources.values()}
        if counts != {1 if self.format.experts_are_stacked or are_fused(sources) else experts}:
            got = ", ".join(map(str, sorted(counts)))
            raise ValueError(f"{name}: expected each tensor of {experts} experts, got {got}")
        if self.format.act_order:
            raise ValueError(f"{name}: expected experts without act-order (desc_act), got sorted columns")

    def replace(self, model: Any, name: str) -> None:
        """Puts a packed layer in the place of the parameter's layer, once for all parameters of a layer."""
        path, _, parameter = name.rpartition(".")
        layer, packing = model.get_submodule(path), self.packings[name]
        if isinstance(layer, PackedExperts):
            return
        if parameter in EXPERTS and is_experts(layer):
            model.set_submodule(path, self.packed_experts(path, layer))
        elif type(layer) is nn.Linear:
            model.set_submodule(path, PackedLinear(layer, packing))
        elif type(layer) is nn.Embedding:
            model.set_submodule(path, PackedEmbedding(layer, packing))
        elif parameter == "weight" and layer.weight.dim() == 2:
            self.dense.add(name)  # a router
        else:
            raise ValueError(f"{name}: expected a linear layer, an embedding or experts, got {type(layer).__name__}")

    def packed_experts(self, path: str, experts: Any) -> PackedExperts:
        if reason := form_reason(experts):
            raise ValueError(f"{path}: {reason}")
        if missing := [name for name in EXPERTS if f"{path}.{name}" not in self.packings]:
            raise ValueError(f"{path}: expected both expert weights to be quantised; {missing[0]} is not")
        return PackedExperts(experts, {name: self.packings[f"{path}.{name}"] for name in EXPERTS})

    def tie(self, model: Any) -> None:
        """Packs a head that is tied to a packed embedding, and lets transformers tie scales and biases too."""
        for head, embedding in list(model.all_tied_weights_keys.items()):
            if embedding not in self.packings or head in self.packings:
                continue
            packing, path = self.packings[embedding], head.rpartition(".")[0]
            layer = model.get_submodule(path)
            if type(layer) is not nn.Linear or not embedding.endswith(".weight"):
                raise ValueError(f"{head}: expected a linear layer tied to the packed {embedding}")
            model.set_submodule(path, PackedLinear(layer, packing))
            source = embedding.rpartition(".")[0]
            model.all_tied_weights_keys |= {f"{path}.{part}": f"{source}.{part}" for part in PARTS}

    # ---- while loading ---------------------------------------------------------------------------------------------

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any) -> list[Any]:
        renamings = []
        if self.format.method == "mlx":
            renamings = [
                WeightRenaming(r"^language_model\.model\.", "model."),
                WeightRenaming(r"^language_model\.lm_head\.", "lm_head."),
            ]
        own = list(converters_of(self, weight_conversions))
        return [*renamings, *others_of(self.format, weight_conversions), *own]

    def get_new_dtype(self, converter: Any, param: Any, dtype: Any) -> Any:
        """Leaves the tensors of a packed layer in their own dtype."""
        operations = getattr(converter, "operations", ())
        is_packed = any(getattr(operation, "quantizer", None) is self for operation in operations)
        return None if is_packed else super().get_new_dtype(converter, param, dtype)

    def param_needs_quantization(self, model: Any, param_name: str, **unused: Any) -> bool:
        """Says which parameters' shapes transformers leaves to the quantizer."""
        layer = model.get_submodule(param_name.rpartition(".")[0])
        return isinstance(layer, (PackedLinear, PackedEmbedding, PackedExperts))

    def unquantized(self, name: str, x: Tensor, model: Any) -> Tensor:
        """Returns a tensor that is not packed as the model wants it: MLX may hold it in another order, or plus one."""
        expected = model.get_parameter(name)
        if x.dim() == 3 and x.shape != expected.shape and x.mT.shape == expected.shape:
            x = x.mT.contiguous()
        elif self.norms_are_shifted and x.dim() == 1 and name.endswith(NORMS_PLUS_ONE):
            shifted = x.float() - 1
            rounded = shifted.to(expected.dtype)
            return rounded if torch.equal(rounded.float(), shifted) else shifted
        return x.to(expected.dtype)

    def expect_mlx_model(self, model: Any, shapes: dict[str, Sizes]) -> None:
        kind = model.config.model_type.removesuffix("_text")
        if kind not in MLX_MODELS or getattr(model.config, "vision_config", None) is not None:
            raise ValueError(
                f"from_pretrained: expected an MLX file of {', '.join(MLX_MODELS)}, as a text model "
                f"(AutoModelForCausalLM), got {type(model).__name__}"
            )
        self.norms_are_shifted = shifts_norms(shapes)

    def _process_model_after_weight_loading(self, model: Any, **unused: Any) -> None:
        for layer in packed_layers(model):
            layer.requires_grad_(False)
            if isinstance(layer, PackedEmbedding):
                layer.compute_in(self.dtype)
        guard_adapters()

    # ---- what transformers asks ------------------------------------------------------------------------------------

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return True  # with LoRA: the packed weights are frozen, and packed experts refuse


def are_fused(sources: Sources) -> bool:
    """Returns whether the file has the experts of a layer, gate above up, in one tensor."""
    return any(source.endswith(tuple(EXPERTS)) for source in sources)


def is_unused(model: Any, name: str) -> bool:
    """Returns whether the model does not use this parameter. It may belong to prediction layers, to the head of a model
    without one, or to the vision part of a file that runs as a text model.
    """
    ignored = model._keys_to_ignore_on_load_unexpected or ()
    head = model.base_model is model and not hasattr(model, name.partition(".")[0])
    return head or name.startswith(VISION) or any(re.search(pattern, name) for pattern in ignored)
