#include "decode/kernels.h"

#include <sstream>

namespace etap {
namespace {

struct Kind {
  const char* name;
  const DecodeKernel* (*find)(int, bool);
};

// In the order of Operands.
constexpr Kind kKinds[kOperandKinds] = {
    {"bfloat16", find_kernel<Operands::kBf16>},
    {"float16", find_kernel<Operands::kFp16>},
    {"FP8", find_kernel<Operands::kFp8>},
    {"FP8 with fp8_math", find_kernel<Operands::kFp8Math>},
    {"lists of bfloat16", find_kernel<Operands::kListedBf16>},
    {"lists without rope", find_kernel<Operands::kListedLatent>},
    {"lists of V3.2", find_kernel<Operands::kListedV32>},
    {"lists of V4", find_kernel<Operands::kListedV4>},
};

void write(std::ostream& to, Operands operands, int row_tile, bool whole_tiles) {
  to << kKinds[int(operands)].name << " x " << row_tile << (whole_tiles ? "" : " in parts of tiles");
}

}  // namespace

const DecodeKernel* find_kernel(Operands operands, int row_tile, bool whole_tiles) {
  return kKinds[int(operands)].find(row_tile, whole_tiles);
}

std::string no_kernel(Operands operands, int row_tile, bool whole_tiles) {
  std::ostringstream text;
  text << "wanted a kernel of";
  const char* separator = " ";
  for (int kind = 0; kind < kOperandKinds; ++kind) {
    for (int rows = kMinRowTile; rows <= kMaxRowTile; rows *= 2) {
      for (const bool whole : {true, false}) {
        if (find_kernel(Operands(kind), rows, whole) == nullptr) continue;
        write(text << separator, Operands(kind), rows, whole);
        separator = ", ";
      }
    }
  }
  write(text << ", got ", operands, row_tile, whole_tiles);
  return text.str();
}

}  // namespace etap
