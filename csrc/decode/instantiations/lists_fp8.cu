#include "decode/kernels.cuh"

namespace etap {

template const DecodeKernel* find_kernel<Operands::kListedV32>(int, bool);
template const DecodeKernel* find_kernel<Operands::kListedV4>(int, bool);

}  // namespace etap
