#include "decode/kernels.cuh"

namespace etap {

template const DecodeKernel* find_kernel<Operands::kFp8>(int, bool);

}  // namespace etap
