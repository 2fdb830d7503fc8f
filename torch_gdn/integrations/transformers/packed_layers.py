"""Layers that replace those of a transformers model and keep their weights packed."""

import importlib
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn import Module, Parameter

import torch_gdn
from torch_gdn.autograd import needs_grad
from torch_gdn.integrations.experts import Matrix, fused_experts, matrix_in
from torch_gdn.quantized import PackedWeight
from torch_gdn.quantized.formats import Packing
from torch_gdn.quantized.packed_weight import fitting_group

PARTS = ("weight", "scales", "biases")
packed_models: WeakSet[Module] = WeakSet()  # models loaded with packed layers


def parameter(x: Tensor) -> Parameter:
    return Parameter(x, requires_grad=False)


def names_of(name: str) -> tuple[str, str, str]:
    """Returns the names of a packed weight's tensors in a layer, by that of the weight."""
    return PARTS if name == "weight" else (name, f"{name}_scales", f"{name}_biases")


def add_parameters(module: Module, name: str, shape: tuple[int, ...], packing: Packing) -> None:
    """Adds the parameters of a packed weight on the meta device; a file will fill them."""
    *rows, K = shape
    groups = 1 if packing.is_e4m3 else K // fitting_group("group size", packing.group_size)
    dtype = torch.uint8 if packing.is_e4m3 else torch.int32
    codes = torch.empty(*rows, K // packing.per_word, dtype=dtype, device="meta")
    scales = torch.empty(*rows, groups, dtype=torch.uint8 if packing.is_mxfp4 else torch.float32, device="meta")
    biases = None if packing.is_e4m3 or packing.is_mxfp4 else parameter(scales.clone())
    for each, x in zip(names_of(name), (parameter(codes), parameter(scales), biases), strict=True):
        module.register_parameter(each, x)


class PackedLinear(torch.nn.Linear):
    """Computes what torch.nn.Linear does, with a packed weight. A subclass, so that PEFT finds and wraps it."""

    scales: Tensor
    biases: Tensor | None
    order: Tensor | None  # gathers x if columns were sorted by group

    def __init__(self, linear: torch.nn.Linear, packing: Packing) -> None:
        Module.__init__(self)  # torch.nn.Linear's would allocate a weight
        self.in_features, self.out_features, self.bits = linear.in_features, linear.out_features, packing.bits
        add_parameters(self, "weight", (self.out_features, self.in_features), packing)
        if linear.bias is not None:
            linear.bias.requires_grad_(False)
        self.register_parameter("bias", linear.bias)
        self.register_buffer("order", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.order is not None:
            x = x.index_select(-1, self.order)
        weight, scales, biases = matrix_in(self)
        assert scales is not None
        return torch_gdn.quantized_linear(x, weight, scales, biases, self.bias)

    @property
    def W_q(self) -> Tensor:
        """The weight under HQQ's name: PEFT calls `dequantize` on a layer with it, for the norms of DoRA."""
        return self.weight

    def dequantize(self) -> Tensor:
        w: Tensor = torch.ops.gdn.dequantize(*matrix_in(self), self.bits, None, torch.float32)
        return w if self.order is None else w.index_select(-1, self.order.argsort())

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bits={self.bits}"


class PackedEmbedding(Module):
    """Computes what torch.nn.Embedding does, with a packed weight."""

    dtype_holder: Tensor
    weight: Tensor
    scales: Tensor
    biases: Tensor | None

    def __init__(self, embedding: torch.nn.Embedding, packing: Packing) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        self.bits = packing.bits
        add_parameters(self, "weight", (self.num_embeddings, self.embedding_dim), packing)

    def compute_in(self, dtype: torch.dtype) -> None:
        """Sets the dtype of rows once the layer is loaded.

        An empty parameter has it and comes first, since transformers takes a model's dtype from the first parameter.
        """
        empty = parameter(torch.empty(0, dtype=dtype, device=self.weight.device))
        self._parameters = {"dtype_holder": empty, **self._parameters}

    def forward(self, ids: Tensor) -> Tensor:
        dtype = self.dtype_holder.dtype
        rows: Tensor = torch.ops.gdn.dequantize(*matrix_in(self), self.bits, ids, dtype)
        return rows

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, bits={self.bits}"


class PackedExperts(Module):
    """Computes what a model's experts do, with packed weights."""

    gate_up_proj: Tensor
    gate_up_proj_scales: Tensor
    gate_up_proj_biases: Tensor | None
    down_proj: Tensor
    down_proj_scales: Tensor
    down_proj_biases: Tensor | None

    def __init__(self, experts: Any, packings: Mapping[str, Packing]) -> None:
        """`packings` has those of gate_up_proj and down_proj."""
        super().__init__()
        self.num_experts, self.config, self.act_fn = experts.num_experts, experts.config, experts.act_fn
        for name in ("gate_up_proj", "down_proj"):
            add_parameters(self, name, tuple(getattr(experts, name).shape), packings[name])

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if needs_grad(hidden_states, top_k_weights):
            raise RuntimeError("packed experts: no gradient passes through them; load the experts unpacked to train")
        return fused_experts(hidden_states, *matrices_of(self), top_k_weights, top_k_index)


def matrices_of(experts: Any) -> tuple[Matrix, Matrix]:
    """Returns gate above up, and down, packed or not."""
    gate_up, down = (matrix_in(experts, name, f"{name}_") for name in ("gate_up_proj", "down_proj"))
    return gate_up, down


def guard_adapters() -> None:
    """Lets PEFT refuse what takes the codes of packed layers for numbers: merging, and adapters that read weights."""
    try:
        tuner: Any = importlib.import_module("peft.tuners.tuners_utils").BaseTuner
        check_merge, check_config = tuner._check_merge_allowed, tuner._check_new_adapter_config
    except Exception:  # another PEFT, or one that does not load; the model does without
        return
    if check_merge.__module__ == __name__:
        return

    def check_packed_merge(self: Any) -> None:
        if any(isinstance(getattr(x, "base_layer", None), PackedLinear) for x in self.model.modules()):
            raise ValueError("merge: adapters of packed layers (PackedLinear) cannot be merged")
        check_merge(self)

    def check_packed_config(self: Any, config: Any) -> None:
        start, kind = getattr(config, "init_lora_weights", True), str(getattr(config.peft_type, "value", None))
        reads_codes = kind not in ("LORA", "IA3") or start not in (True, False, "gaussian")
        reads_codes |= getattr(config, "kasa_config", None) is not None
        if reads_codes and any(isinstance(x, PackedLinear) for x in self.model.modules()):
            expected = "LoRA with init_lora_weights True, False or 'gaussian', or IA3, over packed layers"
            raise ValueError(f"peft_config: expected {expected}, got {kind} with {start!r}")
        check_config(self, config)

    tuner._check_merge_allowed, tuner._check_new_adapter_config = check_packed_merge, check_packed_config


def tensors_of(weight: PackedWeight, name: str) -> dict[str, Parameter]:
    """Returns the parameters of a packed weight by their names in the model, without biases if it has none."""
    layer, _, own = name.rpartition(".")
    tensors = zip(names_of(own), (weight.weight, weight.scales, weight.biases), strict=True)
    return {f"{layer}.{each}": parameter(x) for each, x in tensors if x is not None}


def packed_layers(model: Module) -> Iterator[Module]:
    return (x for x in model.modules() if isinstance(x, (PackedLinear, PackedEmbedding, PackedExperts)))


def layers_packed() -> int:
    """Counts the packed layers of all models that exist."""
    return sum(1 for model in packed_models for _ in packed_layers(model))
