// Pages for the outputs of hits. A large tensor that glibc maps afresh costs a page fault per 4 KiB, often more than
// the kernel itself; blocks returned here keep their pages for the next output of that size. Bounded, reported, emptied
// on request, and off when the limit is 0.
#pragma once

#include <c10/core/Allocator.h>

#include <cstdint>

namespace autokern {

struct PoolStats {
  uint64_t limit_bytes;
  uint64_t kept_bytes; // idle blocks held now
  uint64_t reused;     // allocations served from an idle block
  uint64_t fresh;      // large allocations that found none
};

c10::Allocator* pool_allocator(); // falls through to the CPU allocator for small blocks and when off
void pool_set_limit(uint64_t limit_bytes);
void pool_empty();
PoolStats pool_stats();

} // namespace autokern
