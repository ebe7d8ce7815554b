#include "common/scratch.h"

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
  }
  return block.data;
}

}  // namespace fastattn
