// The cache and each token's list of its rows, as the kernels that gather them are given both.
#pragma once

#include <cutlass/fast_math.h>

#include <cstdint>

namespace etap::sparse {

struct GatheredCache {
  const char* data;     // [pages, page_size, row]
  int32_t row_bytes;    // with the rope part or without, which then counts as zeros
  int64_t page_stride;  // bytes
  int64_t row_stride;   // bytes
  cutlass::FastDivmod page_size;
  int32_t pages;
  uint32_t rows;           // that a physical index may name
  const int32_t* indices;  // [tokens, list_length]: physical rows, or, with a block table, positions in the token's request
  int64_t index_stride;
  const int32_t* block_table;  // [requests, max_pages]
  int64_t block_table_stride;
  const int32_t* request_ids;  // [tokens]
  int32_t requests;
  int32_t max_pages;
};

}  // namespace etap::sparse
