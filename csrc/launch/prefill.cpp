#include "launch/prefill.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <mutex>
#include <utility>

namespace torch_gdn {

namespace {

constexpr std::array kNames = {"chunked", "fused_chunk", "recurrent"};  // in the order of PrefillAlgorithm

std::mutex mutex;
std::map<std::string, std::vector<TuningRow>> measured;  // guarded by mutex
constexpr std::array kCandidates = {PrefillAlgorithm::kFusedChunk, PrefillAlgorithm::kChunked,
                                    PrefillAlgorithm::kRecurrent};
std::array<std::atomic<unsigned>, 2> excluded;  // one bit per algorithm, for each rule

double distance(double a, double b) { return std::abs(std::log2(std::max(a, 1.0) / std::max(b, 1.0))); }

// Returns the choice of the nearest row of the same rule, if there is one.
std::optional<PrefillChoice> nearest(const PrefillShape& shape, const std::vector<TuningRow>& rows) {
  const auto to = [&](const TuningRow& row) {
    if (row.has_channel_decays != shape.has_channel_decays) return double(INFINITY);
    return distance(double(row.tokens), double(shape.tokens)) + distance(double(row.K), double(shape.K)) +
           distance(double(row.threadgroups), double(shape.threadgroups()));
  };
  const auto row =
      std::min_element(rows.begin(), rows.end(), [&](const TuningRow& a, const TuningRow& b) { return to(a) < to(b); });
  return row == rows.end() || std::isinf(to(*row)) ? std::nullopt : std::optional(row->choice);
}

// The first row that matches decides. The rows come from the simulated device's counts and from published rates
// (evidence/lab/studies/prefill_choice.py). Nobody has measured them on a Mac.
struct Range {
  int64_t least_tokens;
  double most_threadgroups_a_core;
};
struct HeuristicRow {
  Range delta_rule, channel_decays;
  PrefillAlgorithm algorithm;
};
constexpr std::array<HeuristicRow, 3> kHeuristic = {{
    {{384, 0.5},
     {256, 4.0},
     PrefillAlgorithm::kChunked},  // too few threadgroups for the cores, so run chunks in parallel
    {{9, INFINITY}, {5, INFINITY}, PrefillAlgorithm::kFusedChunk},
    {{0, INFINITY}, {0, INFINITY}, PrefillAlgorithm::kRecurrent},  // chunks would be mostly padding
}};

PrefillAlgorithm heuristic(const PrefillShape& shape, int64_t cores) {
  const double share = double(shape.threadgroups()) / double(std::max<int64_t>(cores, 1));
  return std::find_if(kHeuristic.begin(), kHeuristic.end(),
                      [&](const HeuristicRow& row) {
                        const Range& range = shape.has_channel_decays ? row.channel_decays : row.delta_rule;
                        return shape.tokens >= range.least_tokens && share <= range.most_threadgroups_a_core;
                      })
      ->algorithm;
}

bool is_excluded(PrefillAlgorithm algorithm, bool has_channel_decays) {
  return (excluded[has_channel_decays] >> unsigned(algorithm) & 1) != 0;
}

PrefillChoice unless_excluded(const PrefillChoice& choice, bool has_channel_decays) {
  if (!is_excluded(choice.algorithm, has_channel_decays)) return choice;
  const auto* candidate = std::find_if_not(kCandidates.begin(), kCandidates.end(), [&](PrefillAlgorithm algorithm) {
    return is_excluded(algorithm, has_channel_decays);
  });
  return candidate == kCandidates.end() ? choice : PrefillChoice{*candidate};
}

PrefillChoice measured_or_heuristic(const PrefillShape& shape, const std::string& device, int64_t cores) {
  const std::lock_guard<std::mutex> guard(mutex);
  const auto rows = measured.find(tuning_key(device, cores));
  const auto choice = rows == measured.end() ? std::nullopt : nearest(shape, rows->second);
  return choice.value_or(PrefillChoice{heuristic(shape, cores)});
}

// Returns whether `wanted` tokens with row_bytes each fit in threadgroup memory.
bool is_possible(int64_t wanted, int64_t row_bytes) { return wanted > 0 && wanted * row_bytes <= 32768; }

}  // namespace

std::optional<PrefillAlgorithm> prefill_algorithm_of(const std::string& name) {
  const auto* known = std::find(kNames.begin(), kNames.end(), name);
  return known == kNames.end() ? std::nullopt : std::optional(PrefillAlgorithm(known - kNames.begin()));
}

std::string name_of(PrefillAlgorithm algorithm) { return kNames[size_t(algorithm)]; }

std::vector<std::string> prefill_algorithms() { return {kNames.begin(), kNames.end()}; }

std::string tuning_key(const std::string& device, int64_t cores) {
  return device + ", " + std::to_string(cores) + " cores";
}

PrefillChoice prefill_algorithm(const PrefillShape& shape, const std::string& device, int64_t cores) {
  const auto forced = forced_prefill_algorithm();
  return unless_excluded(forced.has_value() ? *forced : measured_or_heuristic(shape, device, cores),
                         shape.has_channel_decays);
}

void exclude_prefill_algorithms(bool has_channel_decays, const std::vector<PrefillAlgorithm>& algorithms) {
  unsigned bits = 0;
  for (const auto algorithm : algorithms) bits |= 1u << unsigned(algorithm);
  excluded[has_channel_decays] = bits;
}

void set_tuning_cache(std::map<std::string, std::vector<TuningRow>> rows) {
  const std::lock_guard<std::mutex> guard(mutex);
  measured = std::move(rows);
}

std::optional<PrefillChoice> forced_prefill_algorithm() {
  const auto* forced = ForcedPrefill::innermost();
  return forced == nullptr ? std::nullopt : *forced;
}

int64_t fused_chunk_size(int64_t K, int64_t element_bytes, int64_t wanted) {
  const int64_t key_bytes = (K + 7) / 8 * 8 * element_bytes + 16;                // one padded row of q or k
  const int64_t row_bytes = 2 * key_bytes + 36 * 4 + 2 * (wanted + 4) * 4 + 16;  // q, k, v, both matrices, and gates
  if (is_possible(wanted, row_bytes)) return wanted;
  return K * element_bytes <= 256 ? 16 : 8;
}

int64_t fused_kda_chunk_size(int64_t K, int64_t wanted) {
  const int64_t padded = (K + 7) / 8 * 8;
  const int64_t row_bytes = 3 * (padded + 4) * 4 + padded + 36 * 4 + 2 * 12 * 4 + 4;  // tiles, decays of S, v, matrices
  if (is_possible(wanted, row_bytes)) return wanted;
  return K <= 64 ? 16 : 8;
}

}  // namespace torch_gdn
