"""The tests of `make quick`: each op on both devices, errors, torch.compile and one model, in three minutes on two
cores.

A line is a folder or a file under tests/ or in check/tests/, or a function with all its parameters, or with those that
a bracket starts.
"""

from __future__ import annotations

QUICK = (
    # each op, and its errors
    "gdn/test_errors.py",
    "check/tests/test_registry.py::test_every_op_has_an_entry",
    "gdn/test_golden.py::test_a_stage_fed_what_fla_was_fed[cpu",
    "gdn/test_golden.py::test_a_stage_fed_what_fla_was_fed[mps-chunk_fwd_h-base_k128]",
    "gdn/test_golden.py::test_a_stage_fed_what_fla_was_fed[mps-chunk_fwd_o-base_k128]",
    "gdn/test_golden.py::test_the_prefill_is_as_exact_as_fla",
    "gdn/test_golden.py::test_the_recurrent_op_is_as_exact_as_fla",
    "gdn/test_stages.py::test_equals_the_reference",
    "gdn/test_prepare_chunk_indices.py",
    "gdn/test_always_exercised.py::test_dtypes",
    "gdn/test_always_exercised.py::test_lengths",
    "gdn/test_always_exercised.py::test_packed_and_empty_sequences",
    "gdn/test_always_exercised.py::test_repeated_keys",
    "gdn/test_gated_delta_rule_options.py::test_gates_in_the_kernel",
    "gdn/test_gated_delta_rule_options.py::test_tiled_heads",
    "gdn/test_gated_delta_rule_pool.py::test_slots",
    "kda/test_fused_kda_gate.py::test_equals_the_reference",
    "kda/test_kernels.py::test_dtypes",
    "properties/test_null_slots.py::test_every_number_at_and_below_null_index_is_null",
    "properties/test_null_slots.py::test_rows_that_are_partly_null",
    "layers/",
    "aura/test_aura_paged_attention.py::test_keys_divided_among_threadgroups",
    "attention/test_reshape_and_cache.py",
    "attention/test_paged_attention.py::test_pytorchs_own_attention",
    "attention/test_paged_attention.py::test_keys_divided_among_threadgroups",
    "aura/test_aura_encode.py",
    "aura/test_aura_decode.py::test_part_of_a_cache",
    "aura/test_aura_rotate.py",
    "aura/test_aura_flash_p1.py",
    "aura/test_aura_flash_p2.py",
    "aura/test_aura_attention.py::test_scale",
    "aura/test_aura_kv_cache.py::test_attention_to_what_is_held",
    "aura/test_aura_kv_cache.py::test_saving_and_loading",
    # PyTorch's own machinery
    "gdn/test_opcheck.py::test_opcheck[",
    "gdn/test_compile.py::test_fullgraph_gives_the_same_bits",
    "gdn/test_compile.py::test_one_graph_serves_every_length",
    # the algorithms and kernels that run
    "gdn/test_encoder.py",
    "gdn/test_prefill_algorithm.py",
    "tools/test_tune.py::test_the_heuristic",
    "tools/test_docstrings.py",
    # a model
    "integrations/test_transformers.py::test_on_mps_prefill_and_decode_run_the_kernels[qwen3_next]",
    "integrations/test_transformers_switch.py",
)


def is_quick(node_id: str) -> bool:
    """Takes a test's id relative to the root, such as `tests/gdn/test_errors.py::test_x[cpu]`."""
    return node_id.removeprefix("tests/").startswith(QUICK)
