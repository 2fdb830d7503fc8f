"""Tests the small model's folder: what it learned from, what judged it, and the rule that it trained with."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from examples.pycode import corpus
from examples.pycode.delta_rule import differentiable_delta_rule
from torch_gdn import reference

FOLDER = Path(corpus.__file__).parent
LIBRARY = corpus.standard_library()


def test_at_least_ten_modules_are_held_back() -> None:
    assert len(corpus.held_back_files(LIBRARY)) >= 10


def test_no_held_back_module_is_learned_from() -> None:
    assert not set(corpus.held_back_files(LIBRARY)) & set(corpus.training_files(LIBRARY))


def test_no_test_of_a_held_back_module_is_learned_from(tmp_path: Path) -> None:
    names = ("test/test_argparse.py", "test/test_dataclasses/__init__.py", "test/test_abc.py", "abc.py", "heapq.py")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    learned = [path.relative_to(tmp_path).as_posix() for path in corpus.training_files(tmp_path)]
    assert learned == ["abc.py", "test/test_abc.py"]


def test_pieces_cover_a_text_once() -> None:
    text = torch.arange(10, dtype=torch.uint8)
    assert corpus.pieces(text, 4).tolist() == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]]


def test_a_model_that_knows_nothing_needs_eight_bits_a_byte() -> None:
    class Ignorant(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor, use_cache: bool) -> object:
            return type("Output", (), {"logits": torch.zeros(*input_ids.shape, 256)})

    pieces = torch.randint(256, (3, 9), dtype=torch.uint8)
    assert corpus.bits_per_byte(Ignorant(), pieces, batch=2) == pytest.approx(8)


def test_the_weights_are_below_five_megabytes() -> None:
    assert (FOLDER / "model.safetensors").stat().st_size < 5e6


def heads() -> Iterator[torch.Tensor]:
    torch.manual_seed(0)
    for _ in range(3):
        yield torch.randn(2, 128, 2, 16)
    yield -torch.rand(2, 128, 2) * 0.2
    yield torch.rand(2, 128, 2)


def test_the_rule_of_training_is_the_recurrence() -> None:
    q, k, v, g, beta = heads()
    o, _ = differentiable_delta_rule(q, k, v, g=g, beta=beta)
    exact, _ = reference.fused_recurrent_gated_delta_rule(
        *(x.double() for x in (q, k, v, g, beta)), use_qk_l2norm_in_kernel=True
    )
    for head in range(2):
        assert (o - exact)[:, :, head].norm() < 2e-6 * exact[:, :, head].norm()


def test_the_rule_of_training_has_the_gradients_of_the_recurrence() -> None:
    inputs = [x.requires_grad_() for x in heads()]
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    q, k, v, g, beta = inputs
    differentiable_delta_rule(q, k, v, g=g, beta=beta)[0].square().sum().backward()
    exact, _ = reference.fused_recurrent_gated_delta_rule(*exact_inputs, use_qk_l2norm_in_kernel=True)
    exact.square().sum().backward()
    for ours, wanted in zip(inputs, exact_inputs, strict=True):
        assert ours.grad is not None and wanted.grad is not None
        assert (ours.grad - wanted.grad).norm() < 1e-5 * wanted.grad.norm()
