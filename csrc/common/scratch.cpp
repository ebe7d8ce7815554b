#include "common/scratch.h"

#include <sys/mman.h>

#include <cstdlib>
#include <new>

namespace fastattn {
namespace {

constexpr size_t kStep = size_t{2} << 20;  // a huge page

struct Block {
  void* data = nullptr;
  size_t bytes = 0;
  ~Block() { std::free(data); }
};

thread_local Block t_block;

}  // namespace

void* thread_scratch(size_t bytes) {
  Block& block = t_block;
  if (bytes > block.bytes) {
    std::free(block.data);
    block.bytes = 0;
    const size_t rounded = (bytes + kStep - 1) / kStep * kStep;
    block.data = std::aligned_alloc(kStep, rounded);
    if (block.data == nullptr) throw std::bad_alloc();
    block.bytes = rounded;
#if defined(MADV_HUGEPAGE)
    madvise(block.data, rounded, MADV_HUGEPAGE);  // a wish; without it there are more TLB misses
#endif
  }
  return block.data;
}

SharedScratch::SharedScratch(size_t bytes) : data_(std::aligned_alloc(64, (bytes + 64) / 64 * 64)) {
  if (data_ == nullptr) throw std::bad_alloc();
}

SharedScratch::~SharedScratch() {
  std::free(data_);
}

}  // namespace fastattn
