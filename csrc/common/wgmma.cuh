// WGMMA as all kernels use it: its types, its operands in shared memory, and a product of several of its steps.
#pragma once

#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/tensor.hpp>

namespace etap::wgmma {

constexpr auto kMajorK = cute::GMMA::Major::K;
constexpr auto kMajorMN = cute::GMMA::Major::MN;

// 64 rows x kColumns in float32. Operand B comes from shared memory, and A from there or from registers. Of 24, 40, 48
// or 56 columns CUTLASS makes several narrower products, of which the callers take the first alone, unless
// CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED is defined, in the emulator's build too.
template <class E, int kColumns, cute::GMMA::Major kMajorA = kMajorK>
using OfShared = decltype(cute::make_tiled_mma(
    cute::GMMA::ss_op_selector<E, E, float, cute::Shape<cute::_64, cute::Int<kColumns>, cute::_64>, kMajorA, kMajorK>()));
template <class E, int kColumns, cute::GMMA::Major kMajorB = kMajorK>
using OfRegisters = decltype(cute::make_tiled_mma(
    cute::GMMA::rs_op_selector<E, E, float, cute::Shape<cute::_64, cute::Int<kColumns>, cute::_64>, kMajorK, kMajorB>()));

// What a thread holds of a result.
template <class Mma, int kRows, int kColumns>
using Result = decltype(cute::partition_fragment_C(Mma{}, cute::Shape<cute::Int<kRows>, cute::Int<kColumns>>{}));

// An operand [kRows x kColumns] in shared memory, in the swizzle of an atom.
template <class Atom, int kRows, int kColumns = 64>
using Layout = decltype(cute::tile_to_shape(Atom{}, cute::Shape<cute::Int<kRows>, cute::Int<kColumns>>{}));

// Operands as they lie there. They do not depend on the thread.
template <class Layout, class E>
CUTE_DEVICE auto tensor(const E* from) {
  return cute::make_tensor(cute::make_smem_ptr(from), Layout{});
}
template <class Layout, class Mma>
CUTE_DEVICE auto operand_a(const Mma& mma, const void* from) {
  const auto slice = mma.get_thread_slice(0);
  return slice.make_fragment_A(slice.partition_A(tensor<Layout>(static_cast<const typename Mma::ValTypeA*>(from))));
}
template <class Layout, class Mma>
CUTE_DEVICE auto operand_b(const Mma& mma, const void* from) {
  const auto slice = mma.get_thread_slice(0);
  return slice.make_fragment_B(slice.partition_B(tensor<Layout>(static_cast<const typename Mma::ValTypeB*>(from))));
}

// Starts so many steps of a product, from these of the operands on. Each adds to the result; the first one does what
// mma.accumulate_ says.
template <class Mma, class OperandA, class OperandB, class Result>
CUTE_DEVICE void multiply(Mma& mma, const OperandA& a, int first_a, const OperandB& b, int first_b, int steps,
                          Result&& result) {
  CUTE_UNROLL
  for (int step = 0; step < steps; ++step) {
    cute::gemm(mma, a(cute::_, 0, first_a + step), b(cute::_, 0, first_b + step), result);
    mma.accumulate_ = cute::GMMA::ScaleOut::One;
  }
}
template <class Mma, class OperandA, class OperandB, class Result>
CUTE_DEVICE void multiply(Mma& mma, const OperandA& a, const OperandB& b, Result&& result) {
  multiply(mma, a, 0, b, 0, cute::size<2>(b), result);
}

}  // namespace etap::wgmma
