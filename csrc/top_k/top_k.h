// The k largest logits of each row, exact and in the order of their positions.
#pragma once

#include <cstdint>

#include "common/launch.h"

namespace etap {

struct TopKParams {
  const float* logits;       // [rows, width]
  const int32_t* lengths;    // [rows], or one for each request
  const int32_t* block_table;  // null: positions are written as they are
  int32_t* out;              // [rows, k]
  int64_t logits_stride;     // elements between rows
  int64_t table_stride;
  int64_t out_stride;
  int32_t rows;
  int32_t width;
  int32_t k;
  int32_t rows_per_length;   // query tokens of a request where lengths are its own; 1 where every row has its own
  int32_t rows_per_table;    // query tokens of a request, which has one row of the block table
  int32_t page_size;
  int32_t table_width;
  bool early_lengths;        // lengths were written before the preceding kernel began
};

// num_sms: multiprocessors that the rows are spread over.
KernelLaunch prepare_top_k(const TopKParams& params, int num_sms);

}  // namespace etap
