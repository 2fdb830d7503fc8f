// The choice of a prefill algorithm: that of the nearest shape in the tuning cache, else a heuristic. No Metal here, so
// every machine builds and tests it.
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "shaders/gdn/state_tile.h"

namespace torch_gdn {

enum class PrefillAlgorithm {
  kChunked,     // a kernel a stage, intermediates in device memory; chunks in parallel
  kFusedChunk,  // one kernel, chunk by chunk, the state in registers
  kRecurrent,   // one kernel, token by token, the state in registers
};

std::optional<PrefillAlgorithm> prefill_algorithm_of(const std::string& name);
std::string name_of(PrefillAlgorithm algorithm);
std::vector<std::string> prefill_algorithms();

struct PrefillShape {
  int64_t tokens;  // of a sequence, on average
  int64_t heads;   // value heads of all sequences
  int64_t K, V;
  bool has_channel_decays = false;  // Kimi Delta Attention

  // Of the kernels that carry a state.
  int64_t threadgroups() const { return heads * ((V + kStateColumns - 1) / kStateColumns); }
};

struct PrefillChoice {
  PrefillAlgorithm algorithm;
  int64_t chunk_size = 0;  // of fused_chunk: 8, 16 or 32; 0: chosen by fused_chunk_size()
};

struct TuningRow {
  int64_t tokens, threadgroups, K;
  PrefillChoice choice;
};

// The forced one; else that of the nearest row measured on a device of this name (distance: the sum of |log(ratio)| of
// the sizes); else the heuristic. In place of an excluded one: fused_chunk, else chunked, else recurrent.
PrefillChoice prefill_algorithm(const PrefillShape& shape, const std::string& device, int64_t cores);

// The algorithms that no prefill of the rule may run: the delta rule, or Kimi Delta Attention. Replaces what was
// excluded before. If all are excluded, calls of the ops must not get here.
void exclude_prefill_algorithms(bool has_channel_decays, const std::vector<PrefillAlgorithm>& excluded);

// The name of a device's rows. Chips of one name differ in their number of cores.
std::string tuning_key(const std::string& device, int64_t cores);

// Takes measured rows by tuning_key().
void set_tuning_cache(std::map<std::string, std::vector<TuningRow>> rows);

// Applies to the calling thread alone. nullopt lets the tuning cache or the heuristic decide again.
void force_prefill_algorithm(std::optional<PrefillChoice> choice);
std::optional<PrefillChoice> forced_prefill_algorithm();

// `wanted` tokens where 32 KB of threadgroup memory hold them; else 16 where q and k take at most 8 KB, so that several
// threadgroups fit into a core's 60 KB; else 8.
int64_t fused_chunk_size(int64_t K, int64_t element_bytes, int64_t wanted);

// The same for Kimi Delta Attention, whose q, k and decays are f32 there: 16 up to K of 64.
int64_t fused_kda_chunk_size(int64_t K, int64_t wanted);

}  // namespace torch_gdn
