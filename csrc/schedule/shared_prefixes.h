// Which requests of a step begin with the same pages, and are decoded together as far as those go.
//
// A stack is a number of requests with equal leading tiles, whose query rows fill a CTA's row tile (stack_shape in decode/shape.h).
// Its depth is how many of their tiles are read once. Each member's own tiles begin there: they are never in one CTA with another
// member's, whose rows would be multiplied with them. Block tables tell what is equal: contents are not looked at.
#pragma once

#include <cuda_runtime.h>

#include "params.h"

namespace etap {

constexpr int kMostShared = 4096;  // requests of a batch, which one block sorts

// What is known of a step's stacks: one buffer [kFields, max_batch], whose addresses never change.
struct SharedPlan {
  static constexpr int kFields = 10;

  int32_t* fields;
  int64_t max_batch;

  __host__ __device__ int32_t* order() const { return field(0); }          // [batch], requests sorted by their first pages
  __host__ __device__ int32_t* common() const { return field(1); }         // [batch], tiles in common with the place before
  __host__ __device__ int32_t* own_lens() const { return field(2); }       // [batch], tokens from the own part on
  __host__ __device__ int32_t* first_tiles() const { return field(3); }    // [batch], where that begins
  __host__ __device__ int32_t* places() const { return field(4); }         // [batch], stack * places of a stack + member; -1: none
  __host__ __device__ int32_t* stack_lens() const { return field(5); }     // [stacks], tokens
  __host__ __device__ int32_t* stack_offsets() const { return field(6); }  // [stacks + 1], of the stacks' schedule
  __host__ __device__ int32_t* members() const { return field(7); }        // [stacks, places of a stack], -1: none; two rows
  __host__ __device__ int32_t* stack_count() const { return field(9); }    // [1]

 private:
  __host__ __device__ int32_t* field(int i) const { return fields + i * max_batch; }
};

struct SharedParams {
  SharedPlan plan;
  const int32_t* seq_lens;     // [batch]
  const int32_t* block_table;  // [batch, max_pages]
  int64_t block_table_stride;
  int32_t max_pages;
  int32_t page_size;
  int32_t batch;
  int32_t s_q;
  int32_t stack_places;   // members that a stack has room for
  int32_t least_members;  // that it needs
  int64_t least_tiles;    // of all members in their stacks, below which there are none
};

// Fills the plan, but for stack_offsets, on the device (asynchronously on `stream`) or on host memory, with the same result.
void find_stacks_on_device(const SharedParams& params, cudaStream_t stream);
void find_stacks_on_host(const SharedParams& params);

}  // namespace etap
