#include "decode/kernels.cuh"

namespace etap {

template const DecodeKernel* find_kernel<Operands::kBf16>(int, bool);
template const DecodeKernel* find_kernel<Operands::kFp16>(int, bool);

}  // namespace etap
