// Work on the threads of the OpenMP pool that torch uses.
//
// _C links no OpenMP library: the few entry points needed are looked up in whichever one
// libtorch_cpu has loaded (GNU's under any file name, LLVM's or Intel's), so torch and fastattn
// share one pool and one thread count. Without one, everything runs on the calling thread.
//
// Kernels call the two templates. Which thread runs which piece is not fixed, so a result must
// depend on the piece alone.
#pragma once

#include <atomic>
#include <cstdint>

namespace fastattn {

// Finds torch's OpenMP library; true if found. Call once, after torch is imported.
bool connect_openmp();

// omp_get_max_threads() of torch's OpenMP library on this thread, or 1 without one.
int max_threads();

// Runs body(context) on a team of `threads` threads. An exception on any of them is rethrown here.
void run_team(int threads, void (*body)(void* context), void* context);

#ifdef FASTATTN_ISA
namespace FASTATTN_ISA {

// f(i) for every i in [0, count), handed out in order, one at a time: for pieces of unequal cost.
template <class F>
void parallel_for_each(int64_t count, int threads, const F& f) {
  struct Context {
    std::atomic<int64_t> next;
    int64_t count;
    const F& f;
  } context{{0}, count, f};
  const auto body = [](void* pointer) {
    auto& c = *static_cast<Context*>(pointer);
    for (int64_t i; (i = c.next.fetch_add(1, std::memory_order_relaxed)) < c.count;) c.f(i);
  };
  run_team(static_cast<int>(count < threads ? count : threads), body, &context);
}

// f(begin, end) for consecutive ranges of at most `grain` indices that cover [0, count): for many
// cheap and equal pieces. The ranges depend on `grain` alone, not on the number of threads.
template <class F>
void parallel_for_ranges(int64_t count, int64_t grain, int threads, const F& f) {
  parallel_for_each((count + grain - 1) / grain, threads, [&](int64_t i) {
    const int64_t begin = i * grain;
    f(begin, begin + grain < count ? begin + grain : count);
  });
}

}  // namespace FASTATTN_ISA
#endif

}  // namespace fastattn
