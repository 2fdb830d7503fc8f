"""Replaces the Triton kernels that a V1 runner launches by PyTorch, through vLLM's registry (triton_utils.dispatcher).

A function has the parameters of its kernel, in the same order and with the same names. None reads a tensor on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

import torch_gdn


def compute_slot_mapping(
    num_tokens: int,
    max_num_tokens: int,
    query_start_loc: Tensor,
    positions: Tensor,
    block_table: Tensor,
    block_table_stride: int,
    slot_mapping: Tensor,
    KV_CACHE_BLOCK_SIZE: int,
    TOTAL_CP_WORLD_SIZE: int = 1,
    TOTAL_CP_RANK: int = 0,
    CP_KV_CACHE_INTERLEAVE_SIZE: int = 1,
    PAD_ID: int = -1,
    BLOCK_SIZE: int = 1024,
) -> None:
    """Computes the slot of each token's key and value."""
    if TOTAL_CP_WORLD_SIZE != 1:
        raise NotImplementedError(f"context parallelism: expected 1 process, got {TOTAL_CP_WORLD_SIZE}")
    tables = block_table[: query_start_loc.shape[0] - 1]
    slots = slot_mapping[:max_num_tokens]
    torch_gdn.compute_slot_mapping(positions[:num_tokens], query_start_loc, tables, KV_CACHE_BLOCK_SIZE, slots)


class Drafts:
    """The drafts as [requests, max_spec_len], one row per request."""

    def __init__(self, cu_num_draft_tokens: Tensor, columns: int, total: int) -> None:
        self.counts = cu_num_draft_tokens.diff(prepend=cu_num_draft_tokens.new_zeros(1)).long()[:, None]
        self.columns = torch.arange(columns, device=cu_num_draft_tokens.device)
        self.mask = self.columns < self.counts
        starts = cu_num_draft_tokens.long()[:, None] - self.counts
        self.index = (starts + self.columns).clamp(max=max(total - 1, 0))

    def rows(self, values: Tensor) -> Tensor:
        return values[self.index] if values.shape[0] else values.new_zeros(self.index.shape)

    def write(
        self, output: Tensor, requests_mask: Tensor, accepted: Tensor, draft: Tensor, recovered: Tensor, bonus: Tensor
    ) -> None:
        """Writes accepted drafts of the masked requests, then the first refused one's replacement, or the bonus."""
        lengths = (accepted & self.mask).long().cumprod(1).sum(1, keepdim=True)
        tokens = torch.where(self.columns < lengths, draft, recovered).to(output.dtype)
        written = output[:, : tokens.shape[1]]
        written.copy_(torch.where(requests_mask & self.mask & (self.columns <= lengths), tokens, written))
        positions = torch.arange(output.shape[1], device=output.device)
        ends = requests_mask & (lengths == self.counts) & (positions == self.counts)
        output.copy_(torch.where(ends, bonus.view(-1, 1).to(output.dtype), output))


def rejection_greedy_sample(
    output_token_ids: Tensor,
    cu_num_draft_tokens: Tensor,
    draft_token_ids: Tensor,
    target_argmax: Tensor,
    bonus_token_ids: Tensor,
    is_greedy: Tensor | None,
    max_spec_len: int,
    uniform_probs: Tensor | None,
    synthetic_conditional_rates: Tensor | None,
    SYNTHETIC_MODE: bool = False,
) -> None:
    drafts = Drafts(cu_num_draft_tokens, max_spec_len, draft_token_ids.shape[0])
    draft, wanted = drafts.rows(draft_token_ids).long(), drafts.rows(target_argmax).long()
    accepted = draft == wanted
    if SYNTHETIC_MODE:
        assert uniform_probs is not None and synthetic_conditional_rates is not None
        accepted = (drafts.rows(uniform_probs) < synthetic_conditional_rates[:max_spec_len]) & (draft >= 0)
    requests_mask = torch.ones_like(drafts.counts, dtype=torch.bool) if is_greedy is None else is_greedy[:, None]
    drafts.write(output_token_ids, requests_mask, accepted, draft, wanted, bonus_token_ids)


def rejection_random_sample(
    output_token_ids: Tensor,
    cu_num_draft_tokens: Tensor,
    draft_token_ids: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    bonus_token_ids: Tensor,
    recovered_token_ids: Tensor,
    uniform_probs: Tensor,
    is_greedy: Tensor,
    max_spec_len: int,
    vocab_size: int,
    synthetic_conditional_rates: Tensor | None,
    NO_DRAFT_PROBS: bool = True,
    SYNTHETIC_MODE: bool = False,
) -> None:
    drafts = Drafts(cu_num_draft_tokens, max_spec_len, draft_token_ids.shape[0])
    draft, uniform = drafts.rows(draft_token_ids).long(), drafts.rows(uniform_probs)
    if SYNTHETIC_MODE:
        assert synthetic_conditional_rates is not None
        accepted = uniform < synthetic_conditional_rates[:max_spec_len]
    else:
        tokens = draft_token_ids.long().clamp(min=0)[:, None]
        p = drafts.rows(target_probs.gather(1, tokens)[:, 0])
        q = torch.ones_like(p) if draft_probs is None else drafts.rows(draft_probs.gather(1, tokens)[:, 0])
        accepted = (q > 0) & (p / q >= uniform)
    recovered = drafts.rows(recovered_token_ids).long()
    drafts.write(output_token_ids, ~is_greedy[:, None], accepted & (draft >= 0), draft, recovered, bonus_token_ids)


def sample_recovered_tokens(
    output_token_ids: Tensor,
    cu_num_draft_tokens: Tensor,
    draft_token_ids: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    inv_q: Tensor,
    vocab_size: int,
    BLOCK_SIZE: int = 8192,
    NO_DRAFT_PROBS: bool = True,
    USE_FP64_GUMBEL: bool = False,
) -> None:
    """Samples a token for each draft as if it were refused: from the target's distribution minus the draft's.

    A draft of -1 is padding, which takes nothing from the distribution.
    """
    total = draft_token_ids.shape[0]
    counts = cu_num_draft_tokens.diff(prepend=cu_num_draft_tokens.new_zeros(1)).long()
    requests = torch.arange(counts.shape[0], device=counts.device).repeat_interleave(counts, output_size=total)
    if draft_probs is None:
        drafts = draft_token_ids.long()[:, None]
        kept = torch.where(drafts < 0, target_probs[:, :1], 0.0)  # scatter cannot skip an index: it writes to token 0
        weights = target_probs.scatter(1, drafts.clamp(min=0), kept)
    else:
        weights = (target_probs - draft_probs).clamp(min=0.0)
    output_token_ids.copy_((weights * inv_q[requests]).argmax(dim=1))


def expand(
    output: Tensor,
    input: Tensor,
    cu_num_tokens: Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int = 0,
) -> None:
    """Repeats a request's value for each of its tokens."""
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1)).long()
    values = torch.where(input == replace_from, replace_to, input).to(output.dtype)
    output.copy_(values.repeat_interleave(counts, output_size=output.shape[0]))


def eagle_step_slot_mapping_metadata(
    positions: Tensor,
    block_table: Tensor,
    block_table_stride: int,
    seq_lens: Tensor,
    out_clamped_positions: Tensor,
    out_slot_mapping: Tensor,
    block_size: int,
    max_model_len: int,
    n_blocks_per_req: int,
    PAD_ID: int,
    batch_size: int,
) -> None:
    """Moves a draft model on by one token. Past the longest sequence a token has no slot."""
    following = positions[:batch_size] + 1
    exceeds = following >= max_model_len
    clamped = torch.where(exceeds, 0, following)
    columns = (clamped // block_size).clamp(max=n_blocks_per_req - 1).long()
    blocks = block_table[:batch_size].gather(1, columns[:, None])[:, 0].long()
    out_slot_mapping[:batch_size] = torch.where(exceeds, PAD_ID, blocks * block_size + clamped % block_size)
    out_slot_mapping[batch_size:] = PAD_ID
    out_clamped_positions[:batch_size] = clamped
    lengths = torch.where(exceeds, 1, seq_lens[:batch_size] + 1)
    seq_lens[:batch_size] = lengths.clamp(max=max_model_len)


def eagle_prepare_inputs_padded(
    cu_num_draft_tokens: Tensor,
    valid_sampled_tokens_count: Tensor,
    query_start_loc: Tensor,
    token_indices_to_sample: Tensor,
    num_rejected_tokens: Tensor,
    num_reqs: int,
) -> None:
    """Finds each request's last accepted token in the batch, and counts the refused drafts after it."""
    counts = cu_num_draft_tokens.diff(prepend=cu_num_draft_tokens.new_zeros(1))[:num_reqs]
    rejected = torch.where(counts > 0, counts + 1 - valid_sampled_tokens_count[:num_reqs], 0)
    num_rejected_tokens[:num_reqs] = rejected
    token_indices_to_sample[:num_reqs] = query_start_loc[1 : num_reqs + 1] - 1 - rejected


def eagle_prepare_next_token_padded(
    sampled_token_ids: Tensor,
    discard_request_mask: Tensor,
    backup_next_token_ids: Tensor,
    next_token_ids: Tensor,
    valid_sampled_tokens_count: Tensor,
    vocab_size: int,
    num_sampled_tokens_per_req: int,
    num_reqs: int,
    stride_sampled_token_ids: int,
    BLOCK_SIZE_TOKENS: int = 0,
) -> None:
    """Returns each request's last sampled token, or its backup if there is none, and the number of sampled tokens."""
    tokens = sampled_token_ids[:num_reqs, :num_sampled_tokens_per_req]
    valid = (tokens != -1) & (tokens < vocab_size) & ~discard_request_mask[:num_reqs, None]
    last = torch.where(valid, torch.arange(tokens.shape[1], device=tokens.device), -1).amax(1)
    sampled = tokens.gather(1, last.clamp(min=0)[:, None])[:, 0]
    backup = backup_next_token_ids[:num_reqs].to(sampled.dtype)
    next_token_ids[:num_reqs] = torch.where(last >= 0, sampled, backup)
    valid_sampled_tokens_count[:num_reqs] = valid.sum(1)


OVERRIDES = {
    "vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel": compute_slot_mapping,
    "vllm.v1.sample.rejection_sampler.rejection_greedy_sample_kernel": rejection_greedy_sample,
    "vllm.v1.sample.rejection_sampler.rejection_random_sample_kernel": rejection_random_sample,
    "vllm.v1.sample.rejection_sampler.sample_recovered_tokens_kernel": sample_recovered_tokens,
    "vllm.v1.sample.rejection_sampler.expand_kernel": expand,
    "vllm.v1.spec_decode.utils.eagle_step_slot_mapping_metadata_kernel": eagle_step_slot_mapping_metadata,
    "vllm.v1.spec_decode.utils.eagle_prepare_inputs_padded_kernel": eagle_prepare_inputs_padded,
    "vllm.v1.spec_decode.utils.eagle_prepare_next_token_padded_kernel": eagle_prepare_next_token_padded,
}
