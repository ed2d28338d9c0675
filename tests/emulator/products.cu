// WGMMA through CuTe in the layouts of our kernels: CuTe's descriptors and fragments are what the emulator is held against.
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/tensor.hpp>
#include <cutlass/arch/barrier.h>

using namespace cute;

// D [64, N] = A [64, K] B [N, K]^T, all row-major in global memory.
template <class Element, class AtomA, class AtomB, GMMA::Major kMajorA, int kN, int kK, bool kRegistersA>
__device__ void multiply(const Element* a, const Element* b, float* d) {
  constexpr int kM = 64;
  using LayoutA = decltype(tile_to_shape(AtomA{}, Shape<Int<kM>, Int<kK>>{}));
  using LayoutB = decltype(tile_to_shape(AtomB{}, Shape<Int<kN>, Int<kK>>{}));
  using Tile = Shape<Int<kM>, Int<kN>, Int<kK>>;
  __shared__ __align__(1024) char a_bytes[kM * kK * sizeof(Element)];
  __shared__ __align__(1024) char b_bytes[kN * kK * sizeof(Element)];
  auto* a_elements = reinterpret_cast<Element*>(a_bytes);
  auto* b_elements = reinterpret_cast<Element*>(b_bytes);
  Tensor s_a = make_tensor(make_smem_ptr(a_elements), LayoutA{});
  Tensor s_b = make_tensor(make_smem_ptr(b_elements), LayoutB{});
  const auto place_a = as_position_independent_swizzle_layout(LayoutA{});
  const auto place_b = as_position_independent_swizzle_layout(LayoutB{});
  for (int i = threadIdx.x; i < kM * kK; i += 128) a_elements[place_a(i / kK, i % kK)] = a[i];
  for (int i = threadIdx.x; i < kN * kK; i += 128) b_elements[place_b(i / kK, i % kK)] = b[i];
  cutlass::arch::fence_view_async_shared();
  __syncthreads();
  Tensor g_a = make_tensor(make_gmem_ptr(a), Layout<Shape<Int<kM>, Int<kK>>, Stride<Int<kK>, _1>>{});
  Tensor g_d = make_tensor(make_gmem_ptr(d), Layout<Shape<Int<kM>, Int<kN>>, Stride<Int<kN>, _1>>{});
  const auto run = [&](auto mma, auto&& r_a_of) {
    const auto slice = mma.get_thread_slice(threadIdx.x);
    auto r_a = r_a_of(slice);
    auto r_b = slice.make_fragment_B(slice.partition_B(s_b));
    auto part_d = slice.partition_C(g_d);
    auto r_d = slice.make_fragment_C(part_d);
    mma.accumulate_ = GMMA::ScaleOut::Zero;
    warpgroup_fence_operand(r_d);
    warpgroup_arrive();
    CUTE_UNROLL
    for (int k = 0; k < size<2>(r_b); ++k) {
      gemm(mma, r_a(_, _, k), r_b(_, _, k), r_d);
      mma.accumulate_ = GMMA::ScaleOut::One;
    }
    warpgroup_commit_batch();
    warpgroup_wait<0>();
    warpgroup_fence_operand(r_d);
    copy(r_d, part_d);
  };
  if constexpr (kRegistersA) {
    run(make_tiled_mma(GMMA::rs_op_selector<Element, Element, float, Tile, kMajorA, GMMA::Major::K>()), [&](const auto& slice) {
      auto part_a = slice.partition_A(g_a);
      auto r_a = slice.make_fragment_A(part_a);
      copy(part_a, r_a);
      warpgroup_fence_operand(r_a);
      return r_a;
    });
  } else {
    run(make_tiled_mma(GMMA::ss_op_selector<Element, Element, float, Tile, kMajorA, GMMA::Major::K>()),
        [&](const auto& slice) { return slice.make_fragment_A(slice.partition_A(s_a)); });
  }
}

#define PRODUCT(NAME, ELEMENT, ATOM_A, ATOM_B, MAJOR_A, N, K, REGISTERS)                                                  \
  extern "C" __global__ void __launch_bounds__(128) NAME(const ELEMENT* a, const ELEMENT* b, float* d) {                  \
    multiply<ELEMENT, GMMA::ATOM_A<ELEMENT>, GMMA::ATOM_B<ELEMENT>, GMMA::Major::MAJOR_A, N, K, REGISTERS>(a, b, d);      \
  }

// S^T and O^T of decode/transposed, then those of decode/transposed_fp8, whose A comes from registers; e4m3 from shared memory.
PRODUCT(scores_bf16_n8, bfloat16_t, Layout_K_SW128_Atom, Layout_K_SW128_Atom, K, 8, 64, false)
PRODUCT(scores_f16_n64, half_t, Layout_K_SW128_Atom, Layout_K_SW128_Atom, K, 64, 64, false)
PRODUCT(output_bf16_n16, bfloat16_t, Layout_MN_SW128_Atom, Layout_K_SW128_Atom, MN, 16, 64, false)
PRODUCT(output_f16_n32, half_t, Layout_MN_SW128_Atom, Layout_K_SW128_Atom, MN, 32, 64, false)
PRODUCT(registers_f16_n16, half_t, Layout_K_SW128_Atom, Layout_K_SW128_Atom, K, 16, 64, true)
PRODUCT(registers_e4m3_n8, float_e4m3_t, Layout_K_SW64_Atom, Layout_K_SW64_Atom, K, 8, 64, true)
PRODUCT(registers_e4m3_n64, float_e4m3_t, Layout_K_SW64_Atom, Layout_K_SW64_Atom, K, 64, 64, true)
PRODUCT(scores_e4m3_n16, float_e4m3_t, Layout_K_SW128_Atom, Layout_K_SW64_Atom, K, 16, 128, false)
PRODUCT(scores_e4m3_n8, float_e4m3_t, Layout_K_SW64_Atom, Layout_K_SW64_Atom, K, 8, 64, false)
