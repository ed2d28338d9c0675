// Which decode kernels there are, as the host knows them. The table itself: kernels.cuh, which is compiled kind by kind of operands.
#pragma once

#include <string>

#include "common/launch.h"
#include "params.h"

namespace etap {

// The cache's rows and the type that they are multiplied in.
enum class Operands : int32_t {
  kBf16,
  kFp16,
  kFp8,           // e4m3, multiplied as float16
  kFp8Math,       // e4m3
  kListedBf16,    // rows of sparse attention: bfloat16 with rope,
  kListedLatent,  // without rope, and for 64 query rows V4's,
  kListedV32,     // V3.2's FP8 rows, multiplied as float16,
  kListedV4,      // and V4's
};
constexpr int kOperandKinds = 8;

// What the host needs to know of a compiled kernel: kernels.cuh reads it off its traits.
struct DecodeKernel {
  KernelLaunch launch;  // but for its blocks and their cluster
  PartialLayout partials;
  bool leaves_room;  // a block of the combination finds room beside a CTA
  // The tensor maps of a paged cache.
  CUtensorMapDataType map_type;
  int chunks;         // each 128 bytes, as wide as its swizzle
  int copied_chunks;  // at a time
  bool rope_apart;    // rows are not a whole number of chunks: what is left has a map of its own
};

// The kernel for a row tile, or null. whole_tiles: one copy brings a tile of the cache; else parts or rows. Lists have no others.
template <Operands kOperands>
const DecodeKernel* find_kernel(int row_tile, bool whole_tiles);
const DecodeKernel* find_kernel(Operands operands, int row_tile, bool whole_tiles);

// "wanted" and "got" of a refusal, where there is no such kernel.
std::string no_kernel(Operands operands, int row_tile, bool whole_tiles);

}  // namespace etap
