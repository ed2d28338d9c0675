// From request lengths to balanced WorkRanges.
//
// Every request lies on one line of costs: kPieceCost for starting it, then one unit a tile. The line is cut into
// `partitions` equal parts, so every quantity below is a closed formula in the request's place on the line and all
// requests and partitions are computed at once. Host and device share the formulas.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "params.h"

namespace etap {

constexpr int64_t kPieceCost = 1;  // what a request piece costs beside its tiles, in tiles

struct CostLine {
  int64_t total;
  int64_t partitions;  // at most `total`: more would leave empty ones between the pieces of a request

  __host__ __device__ CostLine(int64_t total, int64_t partitions)
      : total(total), partitions(partitions < total ? partitions : total) {}

  __host__ __device__ static int64_t tiles(int32_t seq_len) {
    return seq_len > 0 ? (int64_t(seq_len) + kTileTokens - 1) / kTileTokens : 0;
  }
  __host__ __device__ static int64_t cost(int32_t seq_len) { return tiles(seq_len) + kPieceCost; }

  // Where partition p begins on the line.
  __host__ __device__ int64_t begin(int64_t p) const { return p < partitions ? p * total / partitions : total; }

  // How many partitions begin before position x.
  __host__ __device__ int64_t begun_before(int64_t x) const { return (x * partitions + total - 1) / total; }

  // The last partition that begins at or before the first tile of the request placed at `place`: it holds that tile.
  __host__ __device__ int64_t owner(int64_t place) const { return begun_before(place + kPieceCost + 1) - 1; }

  // In how many pieces the request at [place, place + cost) is decoded.
  __host__ __device__ int64_t pieces(int64_t place, int64_t cost) const {
    const int64_t extra = begun_before(place + cost) - 1 - owner(place);
    return extra > 0 ? 1 + extra : 1;
  }

  // The tile of the request at `place` where a partition beginning at x starts.
  __host__ __device__ static int64_t tile_at(int64_t place, int64_t x) {
    return x > place + kPieceCost ? x - place - kPieceCost : 0;
  }
};

// Build the schedule on the device (asynchronously on `stream`) or on host memory.
void build_schedule_on_device(const ScheduleParams& params, cudaStream_t stream);
void build_schedule_on_host(const ScheduleParams& params);

}  // namespace etap
