// The CUDA thread emulator's core: every CUDA thread is a fiber, blocks run one after the other.
//
// A launch either runs or fails with a sentence that names the thread, the operation and the source
// line. What is checked, on every launch:
//   barriers     all threads of the block arrive at the same __syncthreads, none has exited
//   collectives  all lanes of the mask arrive at the same operation with the same mask
//   shared       filled with NaN for every block; accesses through fa::load_shared and
//                fa::store_shared stay inside one array, are aligned, and race with no other thread
//   cp.async     the data arrive only when waited for
//   order        threads and blocks run forward, in reverse, or shuffled by a seed
// Sanitizers add what only the compiler sees (global memory, undefined behaviour).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace emulator {

// A line of source code. As a default argument, Site::here() is the caller's.
struct Site {
  const char* file = "";
  int line = 0;
  static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
};

struct Index {
  unsigned x = 0, y = 0, z = 0;
};

extern Index thread_index, block_index, block_size, grid_size;

// Ends the launch with "<what>: block (..) thread (..) at <file>:<line>".
[[noreturn]] void fail(const char* what, Site at);

int lane();

void block_barrier(Site at);

// One meeting of lanes. Each leaves a value of at most 64 bytes, all see everyone's.
struct Collective {
  const char* name;
  Site at;
  uint32_t mask, arrived, unread;
  alignas(16) unsigned char values[32 * 64];
};

Collective& arrive(const char* name, uint32_t mask, const void* value, size_t size, Site at);
void leave(Collective& collective);

// read(values) gives this lane's result from all lanes' values, which are indexed by lane.
template <class T, class Read>
auto collective(const char* name, uint32_t mask, const T& value, Site at, Read read) {
  static_assert(sizeof(T) <= 64);
  Collective& meeting = arrive(name, mask, &value, sizeof value, at);
  auto result = read(reinterpret_cast<const T*>(meeting.values));
  leave(meeting);
  return result;
}

// The next `bytes` of dynamic shared memory after the first `taken`, of which this thread has taken
// `arrays` arrays so far. Guard gaps lie between arrays.
void* take_shared(size_t bytes, size_t taken, int arrays);

enum class Access { load, store };

// Checks an access to shared memory of this thread and notes it for the race check and the bank
// conflict count. A store is checked before it happens: `value` is what will be written.
void touch_shared(Access access, const void* address, size_t size, const void* value, Site at);

// cp.async of 16 bytes; a null source fills with zeros.
void copy_async(void* to, const void* from, Site at);
void commit_copies();
void wait_for_copies(int pending);

// A misaligned access fails; hardware traps.
inline void check_aligned(const void* address, size_t size, const char* what, Site at) {
  if (reinterpret_cast<uintptr_t>(address) % size != 0) fail(what, at);
}

}  // namespace emulator
