#include "prefill_way.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <mutex>
#include <utility>

namespace torch_gdn {

namespace {

constexpr std::array<std::pair<PrefillWay, const char*>, 3> kWays = {{
    {PrefillWay::kStaged, "staged"},
    {PrefillWay::kFused, "fused"},
    {PrefillWay::kSequential, "sequential"},
}};

constexpr int kNotForced = -1;
std::atomic<int> forced = kNotForced;
std::mutex table_mutex;
std::map<std::string, std::vector<PrefillRow>> measured;

double distance(double a, double b) { return std::abs(std::log2(std::max(a, 1.0) / std::max(b, 1.0))); }

PrefillWay nearest(const PrefillShape& shape, const std::vector<PrefillRow>& rows) {
  const auto to = [&](const PrefillRow& row) {
    return distance(double(row.tokens), double(shape.tokens)) + distance(double(row.K), double(shape.K)) +
           distance(double(row.threadgroups), double(shape.threadgroups()));
  };
  return std::min_element(rows.begin(), rows.end(),
                          [&](const PrefillRow& a, const PrefillRow& b) { return to(a) < to(b); })
      ->way;
}

// Reckoned from what the simulated device counts and from chips' published rates (bench/metal_model.py), not measured
// on any Mac. The first row that a call fits into decides.
struct ReckonedRow {
  int64_t least_tokens;
  double most_threadgroups_a_core;
  PrefillWay way;
};
constexpr std::array<ReckonedRow, 3> kReckoned = {{
    {1024, 1.0, PrefillWay::kStaged},  // cores would be idle: within a stage, chunks run at the same time
    {16, INFINITY, PrefillWay::kFused},
    {0, INFINITY, PrefillWay::kSequential},  // a chunk would be filled up with nothing
}};

PrefillWay reckoned(const PrefillShape& shape, int64_t cores) {
  const double share = double(shape.threadgroups()) / double(std::max<int64_t>(cores, 1));
  return std::find_if(kReckoned.begin(), kReckoned.end(),
                      [&](const ReckonedRow& row) {
                        return shape.tokens >= row.least_tokens && share <= row.most_threadgroups_a_core;
                      })
      ->way;
}

}  // namespace

std::optional<PrefillWay> prefill_way_of(const std::string& name) {
  for (const auto& [way, known] : kWays) {
    if (name == known) return way;
  }
  return std::nullopt;
}

std::string name_of(PrefillWay way) {
  for (const auto& [known, name] : kWays) {
    if (way == known) return name;
  }
  return "";
}

std::vector<std::string> prefill_way_names() {
  std::vector<std::string> names;
  for (const auto& each : kWays) names.emplace_back(each.second);
  return names;
}

PrefillWay prefill_way(const PrefillShape& shape, const std::string& device, int64_t cores) {
  if (const auto way = forced_prefill_way()) return *way;
  {
    const std::lock_guard<std::mutex> guard(table_mutex);
    const auto rows = measured.find(device);
    if (rows != measured.end() && !rows->second.empty()) return nearest(shape, rows->second);
  }
  return reckoned(shape, cores);
}

void set_prefill_table(std::map<std::string, std::vector<PrefillRow>> table) {
  const std::lock_guard<std::mutex> guard(table_mutex);
  measured = std::move(table);
}

void force_prefill_way(std::optional<PrefillWay> way) { forced = way.has_value() ? int(*way) : kNotForced; }

std::optional<PrefillWay> forced_prefill_way() {
  const int way = forced;
  return way == kNotForced ? std::nullopt : std::optional(PrefillWay(way));
}

}  // namespace torch_gdn
