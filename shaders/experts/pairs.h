// Finds pairs of a token and an expert in topk_ids. A pair is skipped if its id is negative or too large.
#pragma once
#include "core/error.h"
#include "core/fragment.h"
#include "core/indices.h"
#include "experts/parameters.h"

GDN_CONSTANT int kLeftOut = -1;

METAL_FUNC int64_t id_at(device const int* topk_ids, constant PairParameters& pairs, int token, int slot) {
  return read_index(topk_ids, token * pairs.token_stride + slot * pairs.slot_stride, pairs.id_bytes);
}

// Returns a token's expert, or kLeftOut.
METAL_FUNC int expert_at(device const int* topk_ids, constant PairParameters& pairs, int token, int slot) {
  const int64_t id = id_at(topk_ids, pairs, token, slot);
  return id < 0 || id >= pairs.experts ? kLeftOut : int(id);
}

METAL_FUNC int expert_of_pair(device const int* topk_ids, constant PairParameters& pairs, int pair) {
  return expert_at(topk_ids, pairs, pair / pairs.k, pair % pairs.k);
}

METAL_FUNC void report_pair(
    device const int* topk_ids, constant PairParameters& pairs, int pair, device ErrorLog* errors) {
  const int64_t id = id_at(topk_ids, pairs, pair / pairs.k, pair % pairs.k);
  if (id < pairs.experts) return;
  report_error(errors, pairs.op, "topk_ids: expected ids below the number of experts, got ", id, pair, __LINE__);
}

// Counts bits in pairs of bits, then in fours, then in eights. We know of no Metal source with popcount that Apple's
// compiler accepts.
METAL_FUNC int count_bits(uint word) {
  word -= (word >> 1) & 0x55555555u;
  word = (word & 0x33333333u) + ((word >> 2) & 0x33333333u);
  word = (word + (word >> 4)) & 0x0f0f0f0fu;
  word += word >> 8;
  return int((word + (word >> 16)) & 0x3fu);
}

// A set of up to kFewPairs pairs, one bit for each.
struct PairSet {
  GDN_CONSTANT int kWords = kFewPairs / 32;
  uint words[kWords];

  METAL_FUNC int count() const {
    int result = 0;
    UNROLL for (int i = 0; i < kWords; ++i) result += count_bits(words[i]);
    return result;
  }

  METAL_FUNC void drop_before(int pair) {
    UNROLL for (int i = 0; i < kWords; ++i) {
      const int before = pair - i * 32;
      if (before > 0) words[i] &= before < 32 ? ~(0xffffffffu >> uint(32 - before)) : 0u;
    }
  }

  // Removes the first pair and returns it. The set must not be empty.
  METAL_FUNC int take_first() {
    int first = 0;
    bool is_open = true;
    UNROLL for (int i = 0; i < kWords; ++i) {
      const uint word = words[i];
      const bool is_here = is_open && word != 0;
      first = is_here ? i * 32 + int(ctz(word)) : first;
      words[i] = is_here ? word & (word - 1u) : word;
      is_open = is_open && !is_here;
    }
    return first;
  }
};

METAL_FUNC PairSet first_pairs(int count) {
  PairSet all;
  UNROLL for (int i = 0; i < PairSet::kWords; ++i) all.words[i] = 0xffffffffu;
  PairSet rest = all;
  rest.drop_before(count);
  UNROLL for (int i = 0; i < PairSet::kWords; ++i) all.words[i] &= ~rest.words[i];
  return all;
}

// The experts of up to kFewPairs pairs. Lane l holds those of pairs l, l + 32 and l + 64.
struct FewPairs {
  int experts[PairSet::kWords];

  METAL_FUNC void load(device const int* topk_ids, constant PairParameters& pairs, uint lane) {
    UNROLL for (int i = 0; i < PairSet::kWords; ++i) {
      const int pair = i * 32 + int(lane);
      experts[i] = pair < pairs.count ? expert_of_pair(topk_ids, pairs, pair) : kLeftOut;
    }
  }

  // Every lane must call this, with the same expert.
  METAL_FUNC PairSet with_expert(int expert, uint lane) const {
    PairSet result;
    UNROLL for (int i = 0; i < PairSet::kWords; ++i) {
      result.words[i] = simd_sum(experts[i] == expert ? 1u << lane : 0u);
    }
    return result;
  }
};

// A group of up to `Most` pairs of one expert, or of tokens of the shared expert.
template <int Most>
struct PairGroup {
  PairSet pairs;  // the first `count` pairs belong to the group
  int count;

  METAL_FUNC void take_tokens(int tokens) {
    pairs = first_pairs(tokens);
    count = min(tokens, Most);
  }

  // Takes the pairs with the expert of `pair`, from this pair on. Takes none if they belong to another group. A group
  // starts at every Most-th pair of an expert. Every lane must call this.
  METAL_FUNC void take(thread const FewPairs& few, int expert, int pair, uint lane) {
    pairs = few.with_expert(expert, lane);
    const int all = pairs.count();
    pairs.drop_before(pair);
    const int left = pairs.count();
    count = (all - left) % Most == 0 ? min(left, Most) : 0;
  }
};

// The vectors to multiply.
template <typename T>
struct VectorRows {
  device const T* data;
  int64_t stride;
  int divisor;  // divides a pair's number: k if each row belongs to a token, else 1

  METAL_FUNC device const T* for_pair(int pair) const { return data + int64_t(pair / divisor) * stride; }
};
