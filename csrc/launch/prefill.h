// Chooses a prefill algorithm: that of the nearest shape in the tuning cache, or the heuristic's choice. This file has
// no Metal, so every machine builds and tests it.
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "launch/block.h"
#include "shaders/gdn/parameters.h"

namespace torch_gdn {

enum class PrefillAlgorithm {
  kChunked,     // one kernel per stage, with intermediates in device memory and chunks in parallel
  kFusedChunk,  // one kernel, chunk by chunk, with the state in registers
  kRecurrent,   // one kernel, token by token, with the state in registers
};

std::optional<PrefillAlgorithm> prefill_algorithm_of(const std::string& name);
std::string name_of(PrefillAlgorithm algorithm);
std::vector<std::string> prefill_algorithms();

struct PrefillShape {
  int64_t tokens;  // per sequence, on average
  int64_t heads;   // value heads, added up over all sequences
  int64_t K, V;
  bool has_channel_decays = false;  // true for Kimi Delta Attention

  // Returns the number of threadgroups in the kernels that carry a state.
  int64_t threadgroups() const { return heads * ((V + kStateColumns - 1) / kStateColumns); }
};

struct PrefillChoice {
  PrefillAlgorithm algorithm;
  int64_t chunk_size = 0;  // for fused_chunk: 8, 16 or 32; 0 lets fused_chunk_size() choose
};

struct TuningRow {
  int64_t tokens, threadgroups, K;
  bool has_channel_decays;
  PrefillChoice choice;
};

// Returns the forced algorithm if there is one. Otherwise returns that of the nearest row measured with this rule on a
// device of this name, where the distance is the sum of |log(ratio)| of the sizes. Without such a row, asks the
// heuristic. An excluded algorithm is replaced by fused_chunk, or else by chunked, or else by recurrent.
PrefillChoice prefill_algorithm(const PrefillShape& shape, const std::string& device, int64_t cores);

// Sets the algorithms that no prefill of the rule may run. The rule is the delta rule or Kimi Delta Attention. The call
// replaces earlier exclusions. If all algorithms are excluded, the ops must not choose a prefill.
void exclude_prefill_algorithms(bool has_channel_decays, const std::vector<PrefillAlgorithm>& excluded);

// Returns the key of a device's rows. Chips of the same name can differ in their number of cores.
std::string tuning_key(const std::string& device, int64_t cores);

// Takes measured rows, keyed by tuning_key().
void set_tuning_cache(std::map<std::string, std::vector<TuningRow>> rows);

// Forces an algorithm for the thread that starts it. nullopt lets the tuning cache or the heuristic decide again.
using ForcedPrefill = Block<std::optional<PrefillChoice>>;
std::optional<PrefillChoice> forced_prefill_algorithm();

// Returns `wanted` if that many tokens fit in 32 KB of threadgroup memory. Otherwise returns 16 if q and k take at most
// 8 KB, so that several threadgroups fit in a core's 60 KB. Otherwise returns 8.
int64_t fused_chunk_size(int64_t K, int64_t element_bytes, int64_t wanted);

// Returns the same for Kimi Delta Attention, which holds q, k and decays in threadgroup memory as f32: 16 for K up to
// 64.
int64_t fused_kda_chunk_size(int64_t K, int64_t wanted);

}  // namespace torch_gdn
