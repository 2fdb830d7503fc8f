// Finds pairs of a token and an expert in topk_ids. A pair is skipped if its id is negative or not an expert's.
#pragma once
#include "core/error.h"
#include "core/fragment.h"
#include "core/indices.h"
#include "experts/few_pairs.h"
#include "experts/parameters.h"

GDN_CONSTANT int kLeftOut = -1;
GDN_CONSTANT int kNoPair = 0x7fffffff;

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

// The experts of up to kFewPairs pairs. Lane l holds those of pairs l, l + 32 and l + 64.
struct FewPairs {
  int experts[kFewPairs / 32];

  METAL_FUNC void load(device const int* topk_ids, constant PairParameters& pairs, uint lane) {
    UNROLL for (int i = 0; i < kFewPairs / 32; ++i) {
      const int pair = i * 32 + int(lane);
      experts[i] = pair < pairs.count ? expert_of_pair(topk_ids, pairs, pair) : kLeftOut;
    }
  }

  // Returns how many pairs before `pair` have the expert. Every lane must call.
  METAL_FUNC int count_before(int expert, int pair, uint lane) const {
    int count = 0;
    UNROLL for (int i = 0; i < kFewPairs / 32; ++i) {
      if (experts[i] == expert && i * 32 + int(lane) < pair) ++count;
    }
    return simd_sum(count);
  }

  // Returns the first pair after `pair` with the expert, or kNoPair. Every lane must call.
  METAL_FUNC int next(int expert, int pair, uint lane) const {
    int found = kNoPair;
    UNROLL for (int i = kFewPairs / 32 - 1; i >= 0; --i) {
      const int candidate = i * 32 + int(lane);
      if (experts[i] == expert && candidate > pair) found = candidate;
    }
    return simd_min(found);
  }
};

// A group of up to `Most` pairs of one expert, or tokens of the shared one.
template <int Most>
struct PairGroup {
  int pairs[Most];
  int count;

  METAL_FUNC void take_tokens(int tokens) {
    UNROLL for (int i = 0; i < Most; ++i) pairs[i] = min(i, tokens - 1);
    count = min(tokens, Most);
  }

  // Returns the pairs with the expert of `pair`, from this one on, or none if another group has them. Each group starts
  // at every Most-th pair of the expert. Every lane must call.
  METAL_FUNC void take(thread const FewPairs& few, int expert, int pair, uint lane) {
    count = 0;
    if (expert == kLeftOut || few.count_before(expert, pair, lane) % Most != 0) return;
    int last = pair;
    UNROLL for (int i = 0; i < Most; ++i) {
      pairs[i] = last == kNoPair ? pair : last;
      if (last != kNoPair) {
        count = i + 1;
        last = few.next(expert, last, lane);
      }
    }
  }
};
