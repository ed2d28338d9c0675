#include "decode/kernels.cuh"

namespace etap {

template const DecodeKernel* find_kernel<Operands::kFp8Math>(int, bool);

}  // namespace etap
