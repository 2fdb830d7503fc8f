"""Tests the gradients of norms, gates and the short convolution against autograd through the float64 references, and
what PyTorch does with them and with those of the delta rules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import torch_gdn
from tests.helpers.devices import by_threads, inductor_runs, kernels_run, ready
from tests.helpers.errors import assert_close, assert_same_bits, relative_error
from tests.helpers.gradients import RULES, differentiable, draw_call
from torch_gdn import reference
from torch_gdn.autograd import needs_grad

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ROUNDED = {F32: 1e-6, BF16: 1.8e-3, F16: 2.2e-4}  # one rounding; in float32 the sums over tokens
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    function: Callable[..., Any]
    exact: Callable[..., Any]
    sizes: dict[str, tuple[int, ...]]
    options: dict[str, Any] = field(default_factory=dict)
    kernel: str = "norm_bwd"
    rounds_between: float = 0.0  # roundings of the forward that its gradient inherits, in roundings of the dtype

    def draw(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensors:
        random = torch.Generator().manual_seed(1)
        drawn = {name: torch.randn(size, generator=random) for name, size in self.sizes.items()}
        return {name: x.to(dtype).to(device) for name, x in drawn.items()}


def conv_fn(x: Tensor, weight: Tensor, initial_states: Tensor | None = None, **options: Any) -> Any:
    return torch_gdn.causal_conv1d_fn(x, weight, initial_states=initial_states, **options)


def exact_conv_fn(x: Tensor, weight: Tensor, initial_states: Tensor | None = None, **options: Any) -> Any:
    has_final = options.pop("return_final_states", False)
    options |= {"initial_state": initial_states, "output_final_state": has_final, "state_width": None}
    y, state = reference.causal_conv1d(x.transpose(1, 2), weight, **options)
    return (y.transpose(1, 2), state) if has_final else y.transpose(1, 2)


def exact_rms_norm(x: Tensor, weight: Tensor, residual: Tensor | None = None, **options: Any) -> Any:
    prenorm = options.pop("prenorm", False)
    y, h = reference.rms_norm(x, weight, residual, **options)
    return (y, h) if prenorm else y


def exact_gate(g: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    return reference.gdn_gating(A_log, g, g, dt_bias)[0]


def exact_conv(*args: Tensor, **options: Any) -> Any:
    y, state = reference.causal_conv1d(*args, **options)
    return y if state is None else (y, state)


def conv(*args: Tensor, **options: Any) -> Any:
    y, state = torch_gdn.causal_conv1d(*args, **options)
    return y if state is None else (y, state)


ROWS = {"x": (2, 21, 3, 40), "weight": (40,)}
GATED = ROWS | {"g": (2, 21, 3, 40)}
GATES = {"A_log": (6,), "a": (2, 70, 6), "b": (2, 70, 6), "dt_bias": (6,)}
CHANNELS = {"g": (2, 70, 3, 20), "A_log": (3,), "dt_bias": (60,)}
FILTER = {"weight": (24, 4), "bias": (24,)}
CONV = {"x": (2, 150, 24)} | FILTER
PACKED = {"x": (1, 40, 24), "weight": (24, 3), "bias": (24,), "residual": (1, 40, 24), "initial_state": (5, 24, 4)}
BOUNDARIES = torch.tensor([0, 2, 2, 5, 39, 40])
RUNS = torch.tensor([[0, 0, 1, 1, 1, -1, 1, 2, 2]])
conv_bwd: dict[str, Any] = {"kernel": "causal_conv1d_bwd"}
gate_bwd: dict[str, Any] = {"kernel": "fused_kda_gate_bwd"}
CASES = {
    "l2norm": Case(torch_gdn.l2norm, reference.l2norm, {"x": (2, 21, 3, 40)}),
    "l2norm with an eps": Case(torch_gdn.l2norm, reference.l2norm, {"x": (2, 21, 3, 40)}, {"eps": 0.5}),
    "rms_norm": Case(torch_gdn.rms_norm, exact_rms_norm, ROWS),
    "rms_norm with a residual": Case(
        torch_gdn.rms_norm,
        exact_rms_norm,
        ROWS | {"residual": (2, 21, 3, 40)},
        {"prenorm": True, "zero_centered": True, "eps": 0.5},
        rounds_between=2,
    ),
    "rms_norm of long rows": Case(torch_gdn.rms_norm, exact_rms_norm, {"x": (3, 9001), "weight": (9001,)}),
    "rms_norm_gated": Case(torch_gdn.rms_norm_gated, reference.rms_norm_gated, GATED),
    "rms_norm_gated with a sigmoid": Case(
        torch_gdn.rms_norm_gated, reference.rms_norm_gated, GATED, {"activation": "sigmoid", "eps": 0.5}
    ),
    "gdn_gating": Case(torch_gdn.gdn_gating, reference.gdn_gating, GATES, {"allow_neg_eigval": True}, **gate_bwd),
    "fused_gdn_gate": Case(
        torch_gdn.fused_gdn_gate, exact_gate, {"g": (70, 6), "A_log": (6,), "dt_bias": (6,)}, **gate_bwd
    ),
    "fused_kda_gate": Case(torch_gdn.fused_kda_gate, reference.fused_kda_gate, CHANNELS, **gate_bwd),
    "fused_kda_gate with a bound": Case(
        torch_gdn.fused_kda_gate, reference.fused_kda_gate, CHANNELS, {"lower_bound": -5.0}, **gate_bwd
    ),
    "causal_conv1d": Case(conv, exact_conv, CONV, **conv_bwd),
    "causal_conv1d with silu": Case(conv, exact_conv, CONV, {"activation": "silu"}, **conv_bwd),
    "causal_conv1d over two blocks of tokens": Case(
        conv,
        exact_conv,
        {"x": (1, 1030, 24)} | FILTER | {"residual": (1, 1030, 24), "initial_state": (1, 24, 4)},
        {"activation": "silu", "output_final_state": True},
        **conv_bwd,
    ),
    "causal_conv1d with everything": Case(
        conv,
        exact_conv,
        PACKED,
        {"activation": "silu", "cu_seqlens": BOUNDARIES, "output_final_state": True},
        **conv_bwd,
    ),
    "causal_conv1d_fn with segments": Case(
        conv_fn,
        exact_conv_fn,
        {"x": (1, 24, 9), "weight": (24, 4)},
        {"seq_idx": RUNS, "activation": "silu"},
        **conv_bwd,
    ),
    "causal_conv1d_fn with states": Case(
        conv_fn,
        exact_conv_fn,
        {"x": (2, 24, 2), "weight": (24, 4), "initial_states": (2, 24, 5)},
        {"return_final_states": True},
        **conv_bwd,
    ),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def case_of(rule: str) -> Case:
    """Makes a case of a delta rule that has every gradient: gates, betas and the norm are in the kernel."""
    call = draw_call(rule, 35, raw=True) | {"output_final_state": True}
    names = differentiable(call)
    options = {name: x for name, x in call.items() if name not in names}
    return Case(*RULES[rule], {name: tuple(call[name].shape) for name in names}, options, kernel="chunk_bwd_dqkwg")


# The shortest cases of each kernel, for properties that do not depend on the options. tests/gdn/test_gradients.py
# compares the rules with float64.
SHORTEST = ("rms_norm with a residual", "rms_norm_gated", "gdn_gating", "fused_kda_gate", "causal_conv1d with silu")
FUNCTIONS = {name: CASES[name] for name in SHORTEST} | {rule: case_of(rule) for rule in RULES}
each_function = pytest.mark.parametrize("name", FUNCTIONS)


def run(case: Case, tensors: Tensors, **options: Any) -> tuple[Tensor, ...]:
    device = next(iter(tensors.values())).device
    options = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in (case.options | options).items()}
    result = case.function(**tensors, **options)
    return result if isinstance(result, tuple) else (result,)


def output_gradients(outputs: tuple[Tensor, ...]) -> list[Tensor]:
    random = torch.Generator().manual_seed(2)
    return [torch.randn(y.shape, generator=random).to(y.dtype).to(y.device) for y in outputs]


def gradients(case: Case, tensors: Tensors) -> Tensors:
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    outputs = run(case, leaves)
    with kernels_run(next(iter(leaves.values())).device, case.kernel):
        result = torch.autograd.grad(outputs, list(leaves.values()), output_gradients(outputs))
    return dict(zip(leaves, result, strict=True))


def exact_gradients(case: Case, tensors: Tensors, output_grads: list[Tensor]) -> Tensors:
    leaves = {name: x.detach().cpu().double().requires_grad_() for name, x in tensors.items()}
    result = case.exact(**leaves, **case.options)
    outputs = result if isinstance(result, tuple) else (result,)
    results = torch.autograd.grad(outputs, list(leaves.values()), [x.cpu().double() for x in output_grads])
    return dict(zip(leaves, results, strict=True))


@pytest.mark.sweep(4, of="dtype")
@pytest.mark.parametrize("dtype", ROUNDED, ids=str)
@each_case
def test_equals_autograd_in_float64(device: torch.device, case: Case, dtype: torch.dtype) -> None:
    tensors = case.draw(dtype, device)
    result = gradients(case, tensors)
    with torch.no_grad():
        output_grads = output_gradients(run(case, tensors))
    exact = exact_gradients(case, tensors, output_grads)
    for name, x in result.items():
        assert x.dtype == dtype and x.shape == tensors[name].shape and x.device == tensors[name].device
        bound = ROUNDED[dtype] * (1 + (case.rounds_between if dtype != F32 else 0))
        assert_close(name, x.cpu(), exact[name], bound, 2 if x.dim() > 3 else None)


@each_case
def test_the_reference_has_the_numeric_gradient(case: Case) -> None:
    smaller = (
        {24: 2}
        if "cu_seqlens" in case.options
        else {9001: 5, 1030: 5, 150: 5, 70: 3, 60: 6, 40: 4, 24: 2, 21: 2, 20: 2}
    )
    leaves = {name: torch.randn([smaller.get(n, n) for n in size]).double() for name, size in case.sizes.items()}

    def exact(*tensors: Tensor) -> Any:
        return case.exact(**dict(zip(leaves, tensors, strict=True)), **case.options)

    assert torch.autograd.gradcheck(exact, [x.requires_grad_() for x in leaves.values()])


def every_other_number(x: Tensor) -> Tensor:
    return torch.stack([x, x], -1)[..., 0] if x.dim() > 1 else x


def other_order(x: Tensor) -> Tensor:
    """Returns the same numbers with heads before tokens in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() > 2 else x


@each_function
def test_strides_and_expanded_gradients(device: torch.device, name: str) -> None:
    case = FUNCTIONS[name]
    tensors = case.draw(F32, device)
    leaves = {key: x.detach().requires_grad_() for key, x in tensors.items()}
    ones = [torch.ones_like(y) for y in run(case, leaves)]
    expected = torch.autograd.grad(run(case, leaves), list(leaves.values()), ones)
    expanded = [torch.ones((), device=device).expand(y.shape) for y in ones]
    for strided in (every_other_number, other_order):
        others = {key: strided(x).detach().requires_grad_() for key, x in tensors.items()}
        result = torch.autograd.grad(run(case, others), list(others.values()), expanded)
        for key, x, y in zip(leaves, result, expected, strict=True):
            assert_same_bits(f"{key}, {strided.__name__}", x, y)


@each_function
def test_no_tokens(device: torch.device, name: str) -> None:
    case = FUNCTIONS[name]
    sizes = {k: (n[0], 0, *n[2:]) if len(n) > 2 and "state" not in k else n for k, n in case.sizes.items()}
    leaves = {k: torch.randn(n, device=device).requires_grad_() for k, n in sizes.items()}
    outputs = run(case, leaves)
    result = torch.autograd.grad(outputs, list(leaves.values()), [torch.zeros_like(y) for y in outputs])
    for x, (k, leaf) in zip(result, leaves.items(), strict=True):
        assert x.shape == leaf.shape and not x.any(), k


@each_function
def test_only_what_is_needed(device: torch.device, name: str) -> None:
    case = FUNCTIONS[name]
    tensors = case.draw(F32, device)
    together = gradients(case, tensors)
    for key in tensors:
        leaves = {k: x.detach().clone().requires_grad_(k == key) for k, x in tensors.items()}
        outputs = run(case, leaves)
        pairs = [(y, dy) for y, dy in zip(outputs, output_gradients(outputs), strict=True) if y.requires_grad]
        torch.autograd.backward([y for y, _ in pairs], [dy for _, dy in pairs])
        assert all((x.grad is None) == (k != key) for k, x in leaves.items())
        assert_same_bits(key, leaves[key].grad, together[key])  # type: ignore[arg-type]


@each_function
def test_the_same_bits_each_time(device: torch.device, name: str) -> None:
    tensors = FUNCTIONS[name].draw(BF16, device)
    first, *others = by_threads(lambda: gradients(FUNCTIONS[name], tensors), 1, 2, 2)
    for other in others:
        for key, x in other.items():
            assert_same_bits(key, x, first[key])


@each_function
def test_a_batch_row_has_its_gradients_alone(device: torch.device, name: str) -> None:
    case = FUNCTIONS[name]
    tensors = case.draw(BF16, device)
    together = gradients(case, tensors)
    inputs = [key for key, x in tensors.items() if x.dim() > 2]
    leaves = {k: (x[1:] if k in inputs else x).detach().requires_grad_(k in inputs) for k, x in tensors.items()}
    outputs = run(case, leaves)
    with torch.no_grad():
        output_grads = output_gradients(run(case, tensors))
    result = torch.autograd.grad(outputs, [leaves[key] for key in inputs], [x[1:] for x in output_grads])
    for key, x in zip(inputs, result, strict=True):
        assert_same_bits(key, x, together[key][1:])


def test_a_packed_sequence_has_its_gradients_alone(device: torch.device) -> None:
    tensors = {k: x.to(device) for k, x in CASES["causal_conv1d with everything"].draw(BF16).items()}
    filters = {k: tensors[k] for k in ("weight", "bias")}
    x, state = (tensors[k].requires_grad_() for k in ("x", "initial_state"))
    dy, dstate = torch.randn_like(x), torch.randn_like(state)
    options: dict[str, Any] = {"activation": "silu", "output_final_state": True}
    outputs = torch_gdn.causal_conv1d(x, **filters, initial_state=state, cu_seqlens=BOUNDARIES, **options)
    dx, dinitial = torch.autograd.grad(outputs, (x, state), (dy, dstate))
    for n, (first, last) in enumerate(zip(BOUNDARIES[:-1].tolist(), BOUNDARIES[1:].tolist(), strict=True)):
        own, own_state = x[:, first:last].detach().requires_grad_(), state[n : n + 1].detach().requires_grad_()
        outputs = torch_gdn.causal_conv1d(own, **filters, initial_state=own_state, **options)
        alone = torch.autograd.grad(outputs, (own, own_state), (dy[:, first:last], dstate[n : n + 1]))
        assert_same_bits(f"x of {n}", alone[0], dx[:, first:last])
        assert_same_bits(f"state of {n}", alone[1], dinitial[n : n + 1])


# ---- compared with transformers' own code ----------------------------------------------------------------------------


def plain_conv(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    padded = torch.nn.functional.pad(x.transpose(1, 2), (weight.shape[1] - 1, 0))
    z = torch.nn.functional.conv1d(padded, weight[:, None], bias, groups=weight.shape[0])
    return torch.nn.functional.silu(z).transpose(1, 2)


def plain_gates(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    return -A_log.float().exp() * torch.nn.functional.softplus(a.float() + dt_bias), b.sigmoid()


def plain_norm(kind: str, x: Tensor, weight: Tensor, **gate: Tensor) -> Tensor:
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    layer = getattr(modeling, kind)(x.shape[-1], eps=1e-6)
    result: Tensor = torch.func.functional_call(layer, {"weight": weight}, (x, *gate.values()))
    return result


def plain_l2norm(x: Tensor) -> Tensor:
    result: Tensor = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next").l2norm(x)
    return result


PLAIN = {
    "l2norm": (plain_l2norm, {}),
    "rms_norm": (partial(plain_norm, "Qwen3NextRMSNorm"), {"zero_centered": True}),
    "rms_norm_gated": (partial(plain_norm, "Qwen3NextRMSNormGated"), {"round_norm": True}),
    "gdn_gating": (plain_gates, {"allow_neg_eigval": False}),
    "causal_conv1d with silu": (plain_conv, {}),
}


@pytest.mark.parametrize("name", PLAIN)
def test_as_close_as_transformers_in_bfloat16(device: torch.device, name: str) -> None:
    case, (plain, options) = CASES[name], PLAIN[name]
    case = Case(case.function, case.exact, case.sizes, case.options | options, case.kernel)
    tensors = case.draw(BF16, device)
    result = gradients(case, tensors)
    leaves = {key: x.cpu().requires_grad_() for key, x in tensors.items()}
    outputs = plain(**leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    output_grads = output_gradients(outputs)
    theirs = torch.autograd.grad(outputs, list(leaves.values()), output_grads)
    exact_options = {k: v for k, v in case.options.items() if k != "round_norm"}
    exact = exact_gradients(Case(case.function, case.exact, case.sizes, exact_options), tensors, output_grads)
    for (key, x), other in zip(result.items(), theirs, strict=True):
        ours, other_error = (relative_error(each.cpu().double(), exact[key]) for each in (x, other))
        assert ours <= 1.3 * other_error, f"{key}: {ours:.2e}, transformers {other_error:.2e}"


# ---- PyTorch's ways to ask for gradients -----------------------------------------------------------------------------


@pytest.mark.sweep(6)
@each_function
def test_compiles_as_one_graph(device: torch.device, name: str) -> None:
    case = FUNCTIONS[name]
    tensors = case.draw(F32, device)
    leaves = [x.requires_grad_() for x in tensors.values()]

    def loss(*args: Tensor) -> Tensor:
        return sum((y.square().sum() for y in run(case, dict(zip(tensors, args, strict=True)))), torch.zeros(()))

    expected = torch.autograd.grad(loss(*leaves), leaves)
    torch._dynamo.reset()
    with inductor_runs(device.type):
        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        for x, y in zip(torch.autograd.grad(compiled(*leaves), leaves), expected, strict=True):
            assert_close("gradient", x.cpu(), y.cpu().double(), 1e-6, None)


@each_function
def test_vjp_vmap_checkpoint_hooks_and_retained_graphs(device: torch.device, name: str) -> None:
    case = FUNCTIONS[name]
    tensors = case.draw(F32, device)
    expected = list(gradients(case, tensors).values())

    def of(*args: Tensor) -> tuple[Tensor, ...]:
        return run(case, dict(zip(tensors, args, strict=True)))

    outer = tuple(output_gradients(of(*tensors.values())))

    def pulled(*args: Tensor) -> tuple[Tensor, ...]:
        return torch.func.vjp(of, *args)[1](outer)  # type: ignore[no-any-return]

    for x, y in zip(pulled(*tensors.values()), expected, strict=True):
        assert_same_bits("vjp", x, y)
    halves = [x / 2 for x in tensors.values()]
    both = torch.func.vmap(pulled)(*map(torch.stack, zip(tensors.values(), halves, strict=True)))
    for x, *each in zip(both, expected, pulled(*halves), strict=True):
        assert_same_bits("vmap of vjp", x, torch.stack(each))
    leaves = [x.detach().requires_grad_() for x in tensors.values()]
    seen: list[Tensor] = []
    for wrapped in (of, partial(checkpoint, of, use_reentrant=False)):
        outputs = wrapped(*leaves)
        outputs[0].register_hook(seen.append)
        for _ in range(2):
            result = torch.autograd.grad(outputs, leaves, output_gradients(outputs), retain_graph=True)
            for x, y in zip(result, expected, strict=True):
                assert_same_bits("gradient", x, y)
    assert len(seen) == 4


def test_the_sum_alone_has_gradients(device: torch.device) -> None:
    """Nobody used the normalised rows, only what rms_norm added up."""
    x, residual = (torch.randn(3, 40, device=device).requires_grad_() for _ in range(2))
    _, h = torch_gdn.rms_norm(x, torch.ones(40, device=device), residual=residual, prenorm=True)
    dh = torch.randn(3, 40, device=device)
    for leaf in torch.autograd.grad(h, [x, residual], dh):
        assert_same_bits("dh", leaf, dh)


@each_function
def test_autocast_changes_nothing(device: torch.device, name: str) -> None:
    case = FUNCTIONS[name]
    tensors = case.draw(F32, device)
    expected = gradients(case, tensors)
    with torch.autocast(device.type, BF16):
        result = gradients(case, tensors)
    for key, x in result.items():
        assert_same_bits(key, x, expected[key])


@each_function
def test_a_gradient_of_a_gradient_is_an_error(device: torch.device, name: str) -> None:
    case = FUNCTIONS[name]
    tensors = case.draw(F32, device)
    leaves = [x.requires_grad_() for x in tensors.values()]
    first = torch.autograd.grad(sum(y.sum() for y in run(case, tensors)), leaves, create_graph=True)
    with pytest.raises(RuntimeError, match=r"gdn::\w+_bwd: expected one derivative, got a gradient of a gradient"):
        torch.autograd.grad(sum(x.sum() for x in first), leaves)


def test_a_row_that_is_too_long_for_mps() -> None:
    """It would need more registers than a GPU has. The norm itself takes it, and so does the CPU's gradient."""
    wide = torch.linspace(-2, 2, 1200).requires_grad_()  # FLA's tests have this size
    exact = wide.detach().double().requires_grad_()
    torch_gdn.rms_norm_gated(wide, wide).sum().backward()
    reference.rms_norm_gated(exact, exact).sum().backward()
    assert wide.grad is not None
    assert exact.grad is not None
    assert relative_error(wide.grad, exact.grad) < 1e-6
    with pytest.raises(ValueError, match="x: expected a last dimension of at most 1024 on mps, got 1200"):
        torch_gdn.rms_norm_gated(wide.detach().to(ready("mps")), torch.ones(1200, device="mps"))
    x = torch.ones(1, 12289, requires_grad=True)
    torch_gdn.rms_norm(x).sum().backward()
    on_device = torch.ones(1, 12289, device=ready("mps"), requires_grad=True)
    y = torch_gdn.rms_norm(on_device)
    with pytest.raises(ValueError, match="norm_bwd: x: expected a last dimension of at most 12288 on mps, got 12289"):
        y.sum().backward()


def test_needs_grad() -> None:
    x, leaf = torch.ones(1), torch.ones(1, requires_grad=True)
    assert needs_grad(None, x, leaf) and not needs_grad(x, None) and not needs_grad(x, leaf.detach())
    with torch.no_grad():
        assert not needs_grad(leaf)
