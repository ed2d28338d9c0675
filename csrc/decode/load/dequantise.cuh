// The source of V4's rows for 64 query rows: they become bfloat16 on their way through registers, which is exact.
//
// Four lanes share a row, a quarter of the columns of each chunk (64 columns) each. So a warp's store of 16 bytes a lane touches
// all banks, with the swizzle of eight rows.
#pragma once

#include "decode/load/fill_ring.cuh"
#include "decode/load/row_stream.cuh"

namespace etap::sparse {

// Bytes kFirst and kFirst + 1 of a word: see widen_e4m3.
template <int kFirst>
CUTE_DEVICE uint32_t widen(uint32_t word) {
  const uint32_t high = __byte_perm(word, 0, kFirst == 0 ? 0x1404 : 0x3424);
  return widen_e4m3(high, high >> 4);
}

// What 64 columns of V4's are multiplied with, exactly: a power of two, ue8m0, and what makes up for the bias, twice. kLarge: it
// may be 2 or more, which takes two products.
template <bool kLarge>
struct PowerOfTwo {
  uint32_t value;

  CUTE_DEVICE explicit PowerOfTwo(uint32_t byte)
      : value(byte * 0x00800080 + (kLarge ? 0 : kWidenedBias - 0x3f803f80)) {
    if (kLarge && byte == 0) value = 0x00400040;  // a subnormal
  }
  CUTE_DEVICE uint32_t times(uint32_t widened) const {
    return ptx::mul_bf16x2(kLarge ? ptx::mul_bf16x2(widened, kWidenedBias) : widened, value);
  }
};

// 16 values of e4m3 times a scale, as 16 of bfloat16. A NaN counts as 480.
template <class Scale>
CUTE_DEVICE void dequantise(const uint4& values, const Scale& scale, uint4 (&columns)[2]) {
  columns[0] = {scale.times(widen<0>(values.x)), scale.times(widen<2>(values.x)), scale.times(widen<0>(values.y)),
                scale.times(widen<2>(values.y))};
  columns[1] = {scale.times(widen<0>(values.z)), scale.times(widen<2>(values.z)), scale.times(widen<0>(values.w)),
                scale.times(widen<2>(values.w))};
}

// A lane's quarter of a row: of seven chunks of e4m3 a unit each, of one of 64 bfloat16 two, and the row's powers of two, which lie
// apart. Rows are loaded from where this lane's first unit begins.
struct HeldRow {
  static constexpr int kNopeChunks = (kLatentDim - kRopeDim) / kChunkColumns;
  static constexpr int kNopeBytes = kUnitBytes * kRowLanes;  // of a chunk

  uint4 nope[kNopeChunks];
  uint4 rope[2];
  uint2 scales = {};
  uint2 next_scales = {};

  // The lane's place among those of its row, and its row's in an octet.
  CUTE_DEVICE static int lane() { return threadIdx.x % kRowLanes; }
  CUTE_DEVICE static int row() { return threadIdx.x % kWarpSize / kRowLanes; }
  // Returns the lane's place of a chunk's units. Neighbouring rows take bfloat16 from different halves on, so that a store touches
  // all banks.
  template <int kChunk>
  CUTE_DEVICE static int unit(int half) {
    return kChunk < kNopeChunks ? 2 * lane() + half : lane() + (row() + half) % 2 * kRowLanes;
  }

  // Takes the scales that were asked for, and asks for the next row's, so many bytes behind it.
  CUTE_DEVICE void advance_scales(bool present, uint64_t from, int32_t behind) {
    scales = next_scales;
    ptx::load_once_if(present, from - lane() * kUnitBytes + behind, next_scales);
  }
  // Whether one of the warp's is 2 or more.
  CUTE_DEVICE bool large() const {
    return __any_sync(0xffffffff, (scales.x & 0x80808080) != 0 || (scales.y & 0x00808080) != 0);
  }

  template <int kChunk>
  CUTE_DEVICE void load(bool present, uint64_t from) {
    if constexpr (kChunk < kNopeChunks) {
      ptx::load_once_if(present, from + kChunk * kNopeBytes, nope[kChunk]);
    } else {
      const int half = row() % 2 * kRowLanes * kUnitBytes;
      ptx::load_once_if(present, from + kNopeChunks * kNopeBytes + half, rope[0]);
      ptx::load_once_if(present, from + kNopeChunks * kNopeBytes + (kRowLanes * kUnitBytes - half), rope[1]);
    }
  }

  template <int kChunk, bool kLarge>
  CUTE_DEVICE void columns(uint4 (&to)[2]) const {
    if constexpr (kChunk < kNopeChunks) {
      const uint32_t byte = __byte_perm(kChunk < 4 ? scales.x : scales.y, 0, 0x4440 + kChunk % 4);
      dequantise(nope[kChunk], PowerOfTwo<kLarge>(byte), to);
    } else {
      to[0] = rope[0], to[1] = rope[1];
    }
  }
};

// A warp holds an octet in registers. When the chunks of a stage have become columns, the same chunks of the octet behind it are
// asked for. Stages of a tile are few: the hardware counts loads on their way in few counters, and a wait for early ones would be
// one for late ones, too.
template <class T>
class DequantisedRows {
 public:
  CUTE_DEVICE DequantisedRows(Shared<T>& shared, const DecodeParams& params, int partition, int warp)
      : shared_(shared),
        stream_(params, partition, warp),
        place_(cute::cast_smem_ptr_to_uint(shared.ring) + (warp * kOctetRows + HeldRow::row()) * kLineBytes) {
#pragma unroll 1
    for (int i = 0; i <= RowStream<2>::kAhead; ++i) tile_ = stream_.next();
    aim(0);
    cute::for_each(cute::make_seq<T::kTileChunks>{}, [&](auto chunk) { held_.template load<decltype(chunk)::value>(present_, from_); });
  }

  CUTE_DEVICE bool done() const { return !tile_.is_tile; }

  // Brings the next tile, its split's i-th, into the ring; returns whether it is the split's last.
  CUTE_DEVICE bool fill_tile(KeyPosition<T>& at, int i) {
    const bool last = tile_.last;
    cute::for_each(cute::make_seq<kOctets>{}, [&](auto octet) {
      constexpr int kOctet = decltype(octet)::value;
      const uint32_t present = tile_.present;
      // The octet behind this one: of this tile, or the first of the next one.
      if (kOctet == kOctets - 1) tile_ = stream_.next();
      aim((kOctet + 1) % kOctets);
      if (held_.large()) {
        fill_octet<kOctet, true>(at, i, present);
      } else {
        fill_octet<kOctet, false>(at, i, present);
      }
    });
    at.advance(T::kStagesPerTile);
    return last;
  }

 private:
  // Takes an octet of the tile for the one that is asked for next, and asks for its scales at once. The whole warp calls it.
  CUTE_DEVICE void aim(int octet) {
    const int holder = octet * kOctetRows + HeldRow::row();
    from_ = tile_.row_of(holder) + HeldRow::lane() * kUnitBytes;
    present_ = tile_.present >> holder & 1;
    held_.advance_scales(present_, from_, tile_.scales_of(holder));
  }

  template <int kOctet, bool kLarge>
  CUTE_DEVICE void fill_octet(KeyPosition<T> at, int i, uint32_t present) {
    constexpr bool kFirst = kOctet == 0, kLast = kOctet == kOctets - 1;
    cute::for_each(cute::make_seq<T::kStagesPerTile>{}, [&](auto stage) {
      constexpr int kStage = decltype(stage)::value;
      const auto to = at.ahead(kStage);
      // Consumers that are stuck keep the first stage of a half: that wait traps.
      if (kFirst) ETAP_MARKED(rows_room, shared_.keys.acquire(to, kStage % T::kHalfChunks == 0));
      if (kFirst && kStage == 0) write_mask(shared_.valid[to.stage], present);
      convert_stage<kOctet, kStage, kLarge>(to.stage, i);
      if (kLast) {
        // For WGMMA the consumers fence, as they do where rows are copied: here a fence would wait for all loads on their way.
        __syncwarp();
        if (cute::elect_one_sync() || kReleasingLanes > 1) ETAP_MARKED(rows_commit, shared_.keys.commit(to));
      }
    });
  }

  // Converts the chunks of a stage. Which these are depends on the tile's place in its split.
  template <int kOctet, int kStage, bool kLarge>
  CUTE_DEVICE void convert_stage(int stage, int i) {
    constexpr int kEven = T::first_chunk(kStage, 0), kOdd = T::first_chunk(kStage, 1);
    const uint32_t to = place_ + stage * T::kStageBytes;
    if (kEven == kOdd || i % kConsumerGroups == 0) {
      convert_chunks<kOctet, kEven, kLarge>(to);
    } else {
      convert_chunks<kOctet, kOdd, kLarge>(to);
    }
  }

  template <int kOctet, int kFirstChunk, bool kLarge>
  CUTE_DEVICE void convert_chunks(uint32_t target) {
    cute::for_each(cute::make_seq<T::kChunksPerStage>{}, [&](auto chunk) {
      constexpr int kChunk = decltype(chunk)::value;
      uint4 columns[2];
      held_.template columns<kFirstChunk + kChunk, kLarge>(columns);
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        constexpr int kPlace = (kChunk * kTileTokens + kOctet * kWarpsPerGroup * kOctetRows) * kLineBytes;
        const int unit = HeldRow::unit<kFirstChunk + kChunk>(half) ^ swizzle<kLineBytes>(HeldRow::row());
        ptx::store_shared(target + kPlace + unit * kUnitBytes, columns[half]);
      }
    });
    cute::for_each(cute::make_seq<T::kChunksPerStage>{}, [&](auto chunk) {
      held_.template load<kFirstChunk + decltype(chunk)::value>(present_, from_);
    });
  }

  Shared<T>& shared_;
  RowStream<2> stream_;
  const uint32_t place_;  // of this lane's row of the warp's first octet, in the first stage
  WarpRows tile_;         // whose octets are asked for
  uint64_t from_;
  bool present_;
  HeldRow held_;
};

// Fills the ring. Registers are too short for fill_ring, whose signals no consumer of these rows waits for.
template <class T>
CUTE_DEVICE void dequantise_rows(Shared<T>& shared, const DecodeParams& params, int partition, int warp) {
  static_assert(!T::kAlternatingTiles);
  KeyPosition<T> at;
  DequantisedRows<T> rows(shared, params, partition, warp);
  for (int i = 0; !rows.done();) i = rows.fill_tile(at, i) ? 0 : i + 1;
  await_release<T>(shared, at);
}

}  // namespace etap::sparse
