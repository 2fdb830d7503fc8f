"""Tests PyTorch's own features on the simulated mps device, which a model, a server or a test may need."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import mps_simulator

MPS = "mps"


def both(function: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the function's result on mps and on the CPU."""
    on_mps = function(*(tensor.to(MPS) for tensor in tensors))
    assert on_mps.is_mps
    return on_mps.cpu(), function(*tensors)


def assert_same(function: Any, *tensors: torch.Tensor) -> None:
    on_mps, on_cpu = both(function, *tensors)
    torch.testing.assert_close(on_mps, on_cpu, rtol=0, atol=0)


# ---- random numbers ----


def test_manual_seed_repeats_and_gives_the_cpus_numbers() -> None:
    torch.manual_seed(3)
    first, second = torch.randn(5, device=MPS).cpu(), torch.randn(5, device=MPS).cpu()
    torch.manual_seed(3)
    assert torch.equal(torch.randn(5, device=MPS).cpu(), first)
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(torch.randn(5), first)


def test_rng_state_round_trip() -> None:
    state = torch.mps.get_rng_state()
    first = torch.rand(5, device=MPS).cpu()
    torch.mps.set_rng_state(state)
    assert torch.equal(torch.rand(5, device=MPS).cpu(), first)


def test_generator_argument() -> None:
    generator = torch.Generator(device=MPS).manual_seed(1)
    weights = torch.ones(2, 9, device=MPS)
    first = torch.multinomial(weights, 3, generator=generator).cpu()
    assert torch.equal(torch.multinomial(weights, 3, generator=generator.manual_seed(1)).cpu(), first)


def test_dropout_draws_from_the_mps_generator() -> None:
    x = torch.ones(64, device=MPS)
    cpu_state = torch.get_rng_state()
    torch.mps.manual_seed(5)
    first = F.dropout(x, 0.5).cpu()
    torch.mps.manual_seed(5)
    assert torch.equal(F.dropout(x, 0.5).cpu(), first)
    assert not torch.equal(F.dropout(x, 0.5).cpu(), first)
    assert torch.equal(torch.get_rng_state(), cpu_state)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.rand(3, device=MPS),
        lambda: torch.randint(0, 9, (3,), device=MPS),
        lambda: torch.randperm(7, device=MPS),
        lambda: torch.bernoulli(torch.full((3,), 0.5, device=MPS)),
        lambda: torch.normal(0.0, 1.0, (3,), device=MPS),
        lambda: torch.empty(3, device=MPS).exponential_(),
        lambda: torch.nn.init.trunc_normal_(torch.empty(3, device=MPS)),
    ],
    ids=["rand", "randint", "randperm", "bernoulli", "normal", "exponential_", "trunc_normal_"],
)
def test_random_ops_follow_the_seed(draw: Any) -> None:
    torch.mps.manual_seed(1)
    first = draw().cpu()
    torch.mps.manual_seed(1)
    assert torch.equal(draw().cpu(), first)


def test_fork_rng_restores_the_state() -> None:
    torch.mps.manual_seed(2)
    expected = torch.rand(3, device=MPS).cpu()
    torch.mps.manual_seed(2)
    with torch.random.fork_rng(devices=[0], device_type=MPS):
        torch.rand(1, device=MPS)
    assert torch.equal(torch.rand(3, device=MPS).cpu(), expected)


# ---- streams, events, memory ----


def test_mps_events() -> None:
    start, end = torch.mps.Event(enable_timing=True), torch.mps.Event(enable_timing=True)
    start.record()
    y = torch.ones(3, device=MPS).clone()
    end.record()
    assert not end.query()
    end.wait()
    end.synchronize()
    assert end.query()
    assert start.elapsed_time(end) >= 0
    assert y.tolist() == [1, 1, 1]


def test_generic_events_and_streams() -> None:
    stream = torch.accelerator.current_stream()
    event = torch.Event(device=MPS)
    torch.ones(3, device=MPS).clone()
    stream.record_event(event)
    assert not event.query()
    stream.wait_event(event)
    event.synchronize()
    assert event.query()
    stream.synchronize()
    assert stream.query()


def test_accelerator() -> None:
    assert torch.accelerator.current_accelerator() == torch.device(MPS)
    assert torch.accelerator.is_available()
    assert torch.accelerator.device_count() == 1
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    free, total = torch.accelerator.get_memory_info()
    assert 0 < free <= total


def test_memory_figures() -> None:
    before = torch.mps.current_allocated_memory()
    x = torch.ones(1 << 18, device=MPS)
    assert torch.mps.current_allocated_memory() - before == x.nbytes
    assert torch.mps.driver_allocated_memory() >= x.nbytes
    assert torch.accelerator.max_memory_allocated() >= x.nbytes
    del x
    assert torch.mps.current_allocated_memory() == before
    torch.mps.empty_cache()
    assert torch.mps.recommended_max_memory() > 0


def test_out_of_memory_is_pytorchs_error() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="MPS backend out of memory"):
        torch.empty(1 << 40, dtype=torch.uint8, device=MPS)


def test_memory_fraction() -> None:
    torch.mps.set_per_process_memory_fraction(1e-6)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1 << 20, device=MPS)
    finally:
        torch.mps.set_per_process_memory_fraction(1.7)


def test_pinned_memory() -> None:
    x = torch.ones(4).pin_memory()
    assert x.is_pinned()
    assert not torch.ones(4).is_pinned()
    assert x.to(MPS, non_blocking=True).tolist() == [1, 1, 1, 1]


# ---- asynchrony ----


def test_non_blocking_copy_reads_host_memory_later() -> None:
    torch.mps.synchronize()
    host = torch.ones(4)
    device = host.to(MPS, non_blocking=True)
    host.fill_(7)
    assert device.tolist() == [7, 7, 7, 7]


def test_non_blocking_copy_writes_host_memory_later() -> None:
    device = torch.full((4,), 3.0, device=MPS)
    host = torch.zeros(4)
    host.copy_(device, non_blocking=True)
    assert host.tolist() == [0, 0, 0, 0]
    torch.mps.synchronize()
    assert host.tolist() == [3, 3, 3, 3]


def test_a_freed_block_is_reused_in_stream_order() -> None:
    x = torch.ones(64, device=MPS)
    torch.mps.synchronize()
    block = x.data_ptr()
    y = x.clone()  # this is queued
    del x
    z = torch.empty(64, device=MPS)
    assert z.data_ptr() == block
    assert y.tolist() == [1.0] * 64
    assert z.isnan().all()


def test_a_host_tensor_may_die_before_its_copy_runs() -> None:
    device = torch.arange(1000.0).to(MPS, non_blocking=True)
    assert device.sum().item() == 499500


def test_threads() -> None:
    x = torch.arange(64.0, device=MPS)
    expected = x.cpu() * 2
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(20):
            if not torch.equal((x.clone() + x).cpu(), expected):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("wait", [torch.mps.empty_cache, torch.mps.synchronize, torch.accelerator.synchronize])
def test_a_thread_that_waits_for_the_stream_lets_others_run(wait: Any) -> None:
    thread = threading.Thread(target=wait)
    with mps_simulator.metal.stream_queue():  # it takes a turn to run Python
        thread.start()
        thread.join(timeout=0.05)
        assert thread.is_alive()
    thread.join()


# ---- tensors ----


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize(
    "make",
    [
        lambda dtype: torch.ones(2, dtype=dtype, device=MPS),
        lambda dtype: torch.ones(2, dtype=dtype).to(MPS),
        lambda dtype: torch.ones(2, device=MPS).to(dtype),
        lambda dtype: torch.empty_strided((2,), (1,), dtype=dtype, device=MPS),
        lambda dtype: torch.nn.Linear(2, 2, dtype=dtype).to(MPS),
    ],
    ids=["ones", "to_device", "to_dtype", "empty_strided", "module"],
)
def test_double_precision_is_refused_in_pytorchs_words(make: Any, dtype: torch.dtype) -> None:
    words = {
        torch.float64: "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64",
        torch.complex128: "Trying to convert ComplexDouble to the MPS backend but it does not have support for that",
    }
    with pytest.raises(TypeError, match=words[dtype]):
        make(dtype)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[1:, ::2],
        lambda x: x.t(),
        lambda x: x.view(6, 4),
        lambda x: x.reshape(3, 8).unfold(1, 4, 2),
        lambda x: x.expand(2, 4, 6),
        lambda x: x.as_strided((2, 2), (1, 3), 2),
        lambda x: x.unsqueeze(1).permute(2, 0, 1),
        lambda x: x.chunk(2, dim=1)[1].diagonal(),
        lambda x: torch.view_as_complex(x.view(12, 2)).conj(),
    ],
    ids=["slice", "t", "view", "unfold", "expand", "as_strided", "permute", "diagonal", "complex"],
)
def test_views(view: Any) -> None:
    assert_same(view, torch.arange(24.0).view(4, 6))


def test_views_share_memory() -> None:
    x = torch.zeros(3, 4, device=MPS)
    x[1, 2:] = 5
    x.t()[0].fill_(7)
    assert x.tolist() == [[7, 0, 0, 0], [7, 0, 5, 5], [7, 0, 0, 0]]


def test_in_place_and_out() -> None:
    x = torch.zeros(3, 4, device=MPS)
    x.add_(1).mul_(2)
    y = torch.empty(0, device=MPS)
    torch.add(x, 1, out=y)
    x.index_copy_(0, torch.tensor([0], device=MPS), torch.ones(1, 4, device=MPS))
    assert y.tolist() == [[3.0] * 4] * 3
    assert x.tolist() == [[1.0] * 4, [2.0] * 4, [2.0] * 4]


def test_resize_keeps_the_content() -> None:
    x = torch.arange(4.0, device=MPS)
    x.resize_(600)
    assert x[:4].tolist() == [0, 1, 2, 3]


def test_set_shares_a_storage() -> None:
    x, y = torch.arange(6.0, device=MPS), torch.empty(0, device=MPS)
    y.set_(x.untyped_storage(), 2, (2, 2), (1, 2))
    assert y.tolist() == [[2, 4], [3, 5]]
    assert y.set_().numel() == 0  # type: ignore[call-overload]  # its annotation lacks this form


@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("target", [torch.float32, torch.float16, torch.bfloat16, torch.int32])
def test_conversions(source: torch.dtype, target: torch.dtype) -> None:
    assert_same(lambda x: x.to(target), torch.tensor([[0.0, 1.5, -3.0], [7.25, 100.0, 1e-3]]).t().to(source))


def test_print() -> None:
    assert repr(torch.arange(3.0, device=MPS)) == "tensor([0., 1., 2.], device='mps:0')"


def test_numpy_is_refused() -> None:
    with pytest.raises(TypeError, match="can't convert mps:0 device type tensor to numpy"):
        torch.ones(2, device=MPS).numpy()


def test_default_device() -> None:
    with torch.device(MPS):
        assert torch.zeros(2).is_mps
        assert torch.nn.Linear(2, 2).weight.is_mps


def test_data_pointers_are_aligned_as_inductor_asserts() -> None:
    assert all(torch.empty(size, device=MPS).data_ptr() % 16 == 0 for size in (1, 7, 100, 10000))


# ---- saving and copying ----


def test_pickle() -> None:
    x = torch.arange(4.0, device=MPS)[1:]
    y = pickle.loads(pickle.dumps(x))
    assert y.is_mps
    assert torch.equal(y.cpu(), x.cpu())


def test_save_and_load() -> None:
    x = torch.arange(4.0, device=MPS)
    stream = io.BytesIO()
    torch.save({"x": x}, stream)
    stream.seek(0)
    assert torch.load(stream)["x"].is_mps
    stream.seek(0)
    assert torch.load(stream, map_location="cpu")["x"].device.type == "cpu"
    stream = io.BytesIO()
    torch.save(x.cpu(), stream)
    stream.seek(0)
    assert torch.load(stream, map_location=MPS).tolist() == [0, 1, 2, 3]


def test_safetensors(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    from safetensors.torch import load_file, save_file

    tensors = {"x": torch.arange(6.0).reshape(2, 3), "h": torch.ones(3, dtype=torch.bfloat16)}
    save_file({name: tensor.to(MPS) for name, tensor in tensors.items()}, tmp_path / "file")
    loaded = load_file(tmp_path / "file", device=MPS)
    for name, tensor in tensors.items():
        assert loaded[name].is_mps
        assert torch.equal(loaded[name].cpu(), tensor)


def test_deepcopy() -> None:
    x = torch.arange(4.0, device=MPS)
    y = copy.deepcopy(x)
    assert torch.equal(x.cpu(), y.cpu())
    assert y.data_ptr() != x.data_ptr()
    assert copy.deepcopy(torch.nn.Linear(2, 2).to(MPS)).weight.is_mps


def test_storages() -> None:
    storage = torch.arange(4.0, device=MPS).untyped_storage()
    assert (storage.device, storage.nbytes()) == (torch.device("mps:0"), 16)
    assert storage.clone().cpu().tolist() == storage.cpu().tolist()


# ---- ops ----


@pytest.mark.parametrize(
    "op",
    [
        lambda x: torch.cat([x, x]),
        lambda x: x.topk(2).values,
        lambda x: x.sort(descending=True).indices,
        lambda x: x.cumsum(1),
        lambda x: torch.where(x > 0, x, 0.0),
        lambda x: torch.einsum("ij,kj->ik", x, x),
        lambda x: F.softmax(x, -1),
        lambda x: F.layer_norm(x, (6,)),
        lambda x: torch.linalg.solve_triangular(torch.eye(4, device=x.device) + x[:, :4].tril(-1), x, upper=False),
        lambda x: torch.vmap(lambda row: row.sum())(x),
        lambda x: x[x > 0],
    ],
    ids=["cat", "topk", "sort", "cumsum", "where", "einsum", "softmax", "layer_norm", "solve", "vmap", "mask"],
)
def test_ops_fall_back_to_the_cpu(op: Any) -> None:
    x = torch.randn(4, 6)
    on_mps, on_cpu = both(op, x)
    torch.testing.assert_close(on_mps, on_cpu)


def written(out: torch.Tensor) -> Any:
    """Returns an op that writes to `out`, which it copies to its argument's device each time."""

    def op(x: torch.Tensor) -> torch.Tensor:
        target = out.to(x.device, copy=True)
        torch.mul(x, 2, out=target)
        return target

    return op


def max_into(x: torch.Tensor) -> torch.Tensor:
    values, indices = torch.empty(0, device=x.device), torch.empty(0, dtype=torch.int64, device=x.device)
    result = torch.max(x, dim=1, out=(values, indices))
    assert result.values.data_ptr() == values.data_ptr()
    return values + indices


def put_with_gaps(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[:, torch.tensor([0, 2], device=x.device)] = 9
    return y


def add_to_list(x: torch.Tensor) -> torch.Tensor:
    parts = [x.clone(), x[:2].clone()]
    torch._foreach_add_(parts, 1)
    return torch.cat(parts)


def fill_a_strided_view(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[:, ::2].t().copy_(torch.full((3, 4), 7.0, device=x.device)).mul_(2)
    return y


@pytest.mark.parametrize(
    "op",
    [
        written(torch.zeros(4, 6)),
        written(torch.zeros(0)),
        written(torch.zeros(6, 4).t()),
        max_into,
        put_with_gaps,
        add_to_list,
        fill_a_strided_view,
    ],
    ids=["out", "out_resized", "out_strided", "two_outs", "optional_list", "list_in_place", "strided_view"],
)
def test_ops_that_write_to_their_arguments(op: Any) -> None:
    assert_same(op, torch.randn(4, 6))


def test_an_op_of_another_namespace_does_not_fall_back() -> None:
    with torch.library._scoped_library("simulator_test", "DEF") as library:
        library.define("double(Tensor x) -> Tensor")
        library.impl("double", lambda x: 2 * x, "CPU")
        double = torch.ops.simulator_test.double
        assert double(torch.ones(2)).tolist() == [2, 2]
        with pytest.raises(NotImplementedError, match=r"'simulator_test::double' is not currently implemented"):
            double(torch.ones(2, device=MPS))


@pytest.mark.parametrize("mask", [None, "causal", "bool", "float"])
def test_scaled_dot_product_attention(mask: str | None) -> None:
    q, k, v = torch.randn(3, 2, 4, 5, 8).unbind()
    allowed = torch.ones(5, 5, dtype=torch.bool).tril()
    bias = {"bool": allowed, "float": torch.randn(5, 5)}.get(mask or "")

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        given = None if bias is None else bias.to(tensors[0].device)
        query, key, value = tensors
        return F.scaled_dot_product_attention(query, key, value, attn_mask=given, is_causal=mask == "causal")

    on_mps, on_cpu = both(attend, q, k, v)
    torch.testing.assert_close(on_mps, on_cpu)


def test_attention_with_grouped_heads_and_gradient() -> None:
    q, k = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    gradients = []
    for device in ("cpu", MPS):
        leaf = q.to(device, copy=True).requires_grad_()
        F.scaled_dot_product_attention(leaf, k.to(device), k.to(device), enable_gqa=True).sum().backward()
        assert leaf.grad is not None
        gradients.append(leaf.grad.cpu())
    torch.testing.assert_close(*gradients)


def test_training_step_equals_the_cpus() -> None:
    losses = []
    for device in ("cpu", MPS):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Conv1d(4, 4, 3, padding=2, groups=4), torch.nn.SiLU(), torch.nn.Linear(6, 2)
        ).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(3):
            loss = model(torch.ones(2, 4, 4, device=device)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[1] > 0


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_autocast(dtype: torch.dtype | None) -> None:
    x, weight = torch.ones(2, 4, device=MPS), torch.ones(4, 4, device=MPS)
    with torch.autocast(MPS, dtype=dtype):
        product = F.linear(x, weight)
        assert product.dtype == (dtype or torch.float16)
        assert F.layer_norm(product, (4,)).dtype == torch.float32
    assert not torch.is_autocast_enabled(MPS)


# ---- profile() ----


def test_profile_counts_kernels_fallbacks_and_memory() -> None:
    library = torch.mps.compile_shader("kernel void one(device float* y [[buffer(0)]]) { y[0] = 1; }")
    x = torch.zeros(8, device=MPS)
    with mps_simulator.profile() as outer:
        library.one(x, threads=1)
        with mps_simulator.profile() as inner:
            library.one(x, threads=1)
            x.sin()
    assert (outer.launched("one"), inner.launched("one"), inner.launched("two")) == (2, 1, 0)
    assert inner.kernels["one"].device_bytes_written == 4
    assert inner.fallbacks == {"aten::sin": 1} or inner.fallbacks == {"aten::sin.out": 1}
    assert inner.allocated_bytes == x.nbytes
    assert "one" in str(inner) and "aten::sin" in str(inner)


def test_profile_counts_copies_and_waits() -> None:
    x = torch.zeros(8, device=MPS)
    with mps_simulator.profile() as profile:
        x.copy_(torch.ones(8))
        x.copy_(torch.ones(8), non_blocking=True)
        half = x.half()
        half.tolist()
    assert profile.copies == {"to the device": 2, "to the host": 1, "on the device": 1}
    assert profile.waits == 2
