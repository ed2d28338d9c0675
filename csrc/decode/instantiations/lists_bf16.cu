#include "decode/kernels.cuh"

namespace etap {

template const DecodeKernel* find_kernel<Operands::kListedBf16>(int, bool);
template const DecodeKernel* find_kernel<Operands::kListedLatent>(int, bool);

}  // namespace etap
