// Chooses a prefill algorithm: that of the nearest shape in the tuning cache, or else the heuristic's. This file has no
// Metal, so every machine builds and tests it.
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "shaders/gdn/state_tile.h"

namespace torch_gdn {

enum class PrefillAlgorithm {
  kChunked,     // one kernel per stage, intermediates in device memory, chunks in parallel
  kFusedChunk,  // one kernel, chunk by chunk, the state in registers
  kRecurrent,   // one kernel, token by token, the state in registers
};

std::optional<PrefillAlgorithm> prefill_algorithm_of(const std::string& name);
std::string name_of(PrefillAlgorithm algorithm);
std::vector<std::string> prefill_algorithms();

struct PrefillShape {
  int64_t tokens;  // per sequence, on average
  int64_t heads;   // value heads of all sequences
  int64_t K, V;
  bool has_channel_decays = false;  // true for Kimi Delta Attention

  // Returns the threadgroups of the kernels that carry a state.
  int64_t threadgroups() const { return heads * ((V + kStateColumns - 1) / kStateColumns); }
};

struct PrefillChoice {
  PrefillAlgorithm algorithm;
  int64_t chunk_size = 0;  // for fused_chunk: 8, 16 or 32; 0 lets fused_chunk_size() choose
};

struct TuningRow {
  int64_t tokens, threadgroups, K;
  PrefillChoice choice;
};

// Returns the forced algorithm; else that of the nearest row measured on a device of this name (distance: the sum of
// |log(ratio)| of the sizes); else what the heuristic says. An excluded algorithm is replaced by fused_chunk, else
// chunked, else recurrent.
PrefillChoice prefill_algorithm(const PrefillShape& shape, const std::string& device, int64_t cores);

// Sets the algorithms that no prefill of the rule may run. The rule is the delta rule or Kimi Delta Attention. The call
// replaces earlier exclusions. If all are excluded, the ops must not choose a prefill.
void exclude_prefill_algorithms(bool has_channel_decays, const std::vector<PrefillAlgorithm>& excluded);

// Returns the name of a device's rows. Chips with the same name can differ in their number of cores.
std::string tuning_key(const std::string& device, int64_t cores);

// Takes measured rows by tuning_key().
void set_tuning_cache(std::map<std::string, std::vector<TuningRow>> rows);

// Applies only to the calling thread. nullopt lets the tuning cache or the heuristic decide again.
void force_prefill_algorithm(std::optional<PrefillChoice> choice);
std::optional<PrefillChoice> forced_prefill_algorithm();

// Returns `wanted` if 32 KB of threadgroup memory hold so many tokens; else 16 if q and k take at most 8 KB, so that
// several threadgroups fit into a core's 60 KB; else 8.
int64_t fused_chunk_size(int64_t K, int64_t element_bytes, int64_t wanted);

// Returns the same for Kimi Delta Attention, whose q, k and decays are f32 in threadgroup memory: 16 for K up to 64.
int64_t fused_kda_chunk_size(int64_t K, int64_t wanted);

}  // namespace torch_gdn
