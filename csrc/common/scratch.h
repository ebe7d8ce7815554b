// Memory that a thread keeps between calls, for panels and rows that must not be allocated anew.
#pragma once

#include <cstddef>

namespace fastattn {

// At least `bytes` bytes, aligned to 64, owned by the calling thread and uninitialised. The next
// call on the same thread takes them back. Grows in steps and stays until the thread ends, so its
// pages are touched for the first time only once. Throws std::bad_alloc.
void* thread_scratch(size_t bytes);

// Cuts one block into pieces, each aligned to 64.
class Carver {
 public:
  explicit Carver(void* base) : base_(static_cast<char*>(base)) {}

  template <class T>
  T* take(size_t count) {
    char* piece = base_ + bytes_;
    bytes_ += (count * sizeof(T) + 63) / 64 * 64;
    return reinterpret_cast<T*>(piece);
  }

  size_t bytes() const { return bytes_; }

 private:
  char* base_;
  size_t bytes_ = 0;
};

// A Layout is a struct of pointers with a constructor Layout(Carver&, sizes...) that takes them.
// Runs it once to measure and once on this thread's scratch.
template <class Layout, class... Sizes>
Layout carve_scratch(Sizes... sizes) {
  Carver measure(nullptr);
  static_cast<void>(Layout(measure, sizes...));
  Carver carver(thread_scratch(measure.bytes()));
  return Layout(carver, sizes...);
}

// Memory that all threads of a call see, freed with the object. Throws std::bad_alloc.
class SharedScratch {
 public:
  explicit SharedScratch(size_t bytes);
  ~SharedScratch();
  SharedScratch(const SharedScratch&) = delete;
  SharedScratch& operator=(const SharedScratch&) = delete;

  void* data() const { return data_; }

 private:
  void* data_;
};

}  // namespace fastattn
