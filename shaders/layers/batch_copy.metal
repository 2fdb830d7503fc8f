// Copies ranges of bytes within a pool. The `parts` threadgroups of a row own one range, and take turns at its tiles.
// If the range overlaps itself, the first of these threadgroups copies all tiles, in an order that reads each tile
// before it is overwritten.
// Registers: 4 units per thread. A unit is 16 bytes if source and destination are equally far from a multiple of 16,
// otherwise 2 bytes or 1.
// Layout: pool [bytes]; offsets and sizes [n], int32 or int64, any stride.
#include "core/error.h"
#include "core/fragment.h"
#include "core/slots.h"
#include "layers/parameters.h"

// The order in which a threadgroup processes its tiles.
struct TileOrder {
  int first, step;
  bool is_descending;
  bool is_ordered;  // reads a whole tile before it writes any of it
};

template <typename Unit>
METAL_FUNC void copy_units(
    device uchar* pool, int64_t source, int64_t destination, int64_t units, TileOrder order, uint thread_index) {
  constexpr int kTile = kCopyThreads * kCopyUnits;
  device const Unit* from = (device const Unit*)(pool + source);
  device Unit* to = (device Unit*)(pool + destination);
  const int64_t tiles = (units + kTile - 1) / kTile;
  for (int64_t tile = order.first; tile < tiles; tile += order.step) {
    const int64_t first = (order.is_descending ? tiles - 1 - tile : tile) * kTile + int64_t(thread_index);
    Unit values[kCopyUnits];
    UNROLL for (int unit = 0; unit < kCopyUnits; ++unit) {
      if (first + unit * kCopyThreads < units) values[unit] = from[first + unit * kCopyThreads];
    }
    if (order.is_ordered) threadgroup_barrier(mem_flags::mem_device);
    UNROLL for (int unit = 0; unit < kCopyUnits; ++unit) {
      if (first + unit * kCopyThreads < units) to[first + unit * kCopyThreads] = values[unit];
    }
  }
}

// Copies single bytes up to a multiple of the unit, then units, then the remaining bytes, or all in reverse order.
METAL_FUNC void copy_range(
    device uchar* pool,
    int64_t source,
    int64_t destination,
    int64_t size,
    int misalignment,
    TileOrder order,
    uint thread_index) {
  const int64_t apart = destination - source;
  const int shift = apart % 16 == 0 ? 4 : apart % 2 == 0 ? 1 : 0;
  const int bytes = 1 << shift;
  const int64_t head = min(size, -(misalignment + destination) & int64_t(bytes - 1));
  const int64_t units = (size - head) >> shift;
  const int64_t tail = size - head - (units << shift);
  for (int step = 0; step < 3; ++step) {
    const int stage = order.is_descending ? 2 - step : step;
    const int64_t offset = stage == 0 ? 0 : stage == 1 ? head : size - tail;
    const int64_t count = stage == 0 ? head : stage == 1 ? units : tail;
    if (stage == 1 && bytes == 16) {
      copy_units<uint4>(pool, source + offset, destination + offset, count, order, thread_index);
    } else if (stage == 1 && bytes == 2) {
      copy_units<ushort>(pool, source + offset, destination + offset, count, order, thread_index);
    } else {
      copy_units<uchar>(pool, source + offset, destination + offset, count, order, thread_index);
    }
  }
}

METAL_FUNC bool is_inside(int64_t offset, int64_t size, int64_t bytes) {
  return offset >= 0 && offset <= bytes && size <= bytes - offset;
}

template <int Threads>
[[kernel]] void batch_copy(
    device uchar* pool [[buffer(0)]],
    device const int* source_offsets [[buffer(1)]],
    device const int* destination_offsets [[buffer(2)]],
    device const int* sizes [[buffer(3)]],
    device ErrorLog* errors [[buffer(4)]],
    constant BatchCopyParameters& parameters [[buffer(5)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  static_assert(Threads == kCopyThreads, "tiles are of so many threads");
  const int64_t n = int64_t(group.y);
  const int64_t source = read_index(source_offsets, n * parameters.source_stride, parameters.source_bytes);
  const int64_t destination =
      read_index(destination_offsets, n * parameters.destination_stride, parameters.destination_bytes);
  const int64_t size = read_index(sizes, n * parameters.size_stride, parameters.size_bytes);
  const bool source_is_inside = is_inside(source, size, parameters.pool_bytes);
  const bool destination_is_inside = is_inside(destination, size, parameters.pool_bytes);
  if (group.x == 0 && thread_index == 0) {
    if (size < 0) {
      report_error(errors, parameters.op, "sizes: expected non-negative numbers of bytes, got ", size, n, __LINE__);
    }
    if (!source_is_inside) {
      report_error(errors, parameters.op, "source_offsets: expected ranges within the pool, got ", source, n, __LINE__);
    }
    if (!destination_is_inside) {
      report_error(
          errors, parameters.op, "destination_offsets: expected ranges within the pool, got ", destination, n,
          __LINE__);
    }
  }
  if (size <= 0 || !source_is_inside || !destination_is_inside) return;

  const bool is_ordered = source < destination + size && destination < source + size;
  if (is_ordered && group.x != 0) return;
  const TileOrder order{int(group.x), is_ordered ? 1 : int(groups.x), is_ordered && destination > source, is_ordered};
  copy_range(pool, source, destination, size, parameters.misalignment, order, thread_index);
}
