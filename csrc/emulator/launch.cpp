// The scheduler and the launch itself, the only function that Python calls.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "emulator/state.h"

namespace emulator {

Index thread_index, block_index, block_size, grid_size;
Block block;

namespace {

constexpr size_t kStack = 256 << 10;
constexpr int kMaxThreads = 1024;

void (*kernel)(const void*);
const void* kernel_params;

std::string triple(Index i) {
  return "(" + std::to_string(i.x) + ", " + std::to_string(i.y) + ", " + std::to_string(i.z) + ")";
}

void thread_body() {
  kernel(kernel_params);
  Thread& self = *block.current;
  finish_copies(self);
  leave_warp(self);
  self.state = State::exited;
  --block.running;
  self.fiber.yield(true);
}

// Stacks for the largest block, each with a page below it that nobody may touch.
char* stacks() {
  static char* const memory = [] {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    void* all = mmap(nullptr, kMaxThreads * kStack, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (all == MAP_FAILED) return static_cast<char*>(nullptr);
    for (int i = 0; i < kMaxThreads; ++i)
      mprotect(static_cast<char*>(all) + i * kStack, page, PROT_NONE);
    return static_cast<char*>(all);
  }();
  return memory;
}

void resume(Thread& thread) {
  block.current = &thread;
  thread_index = thread.index;
  thread.fiber.resume();
}

void pass_barrier() {
  check_guards();
  block.at_barrier = 0;
  ++block.barriers;
  for (Thread& thread : block.threads) thread.state = State::ready;
}

// Nobody can go on: the threads wait for each other in different places.
void report_deadlock() {
  block.error = "deadlock";
  for (State state : {State::in_collective, State::at_barrier}) {
    const auto found = std::find_if(block.threads.begin(), block.threads.end(),
                                    [&](const Thread& t) { return t.state == state; });
    if (found == block.threads.end()) continue;
    block.error += ": " + describe(*found) + " waits in " + found->waits_for + " at " +
                   describe(found->waits_at);
  }
}

void run_block(const std::vector<int>& order) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  poison_shared();
  block.running = static_cast<int>(block.threads.size());
  block.at_barrier = 0;
  ++block.barriers;
  for (Warp& warp : block.warps) warp = {};
  for (size_t i = 0; i < block.threads.size(); ++i) {
    Thread& thread = block.threads[i];
    thread.state = State::ready;
    thread.open_copies.clear();
    thread.copy_groups.clear();
    thread.fiber.start(stacks() + i * kStack + page, kStack - page, thread_body);
  }
  while (block.running > 0) {
    bool anyone = false;
    for (int i : order) {
      if (block.threads[i].state != State::ready) continue;
      anyone = true;
      resume(block.threads[i]);
      if (!block.error.empty()) return;
    }
    if (anyone) continue;
    if (block.at_barrier == 0 || block.at_barrier != block.running) return report_deadlock();
    pass_barrier();
    if (!block.error.empty()) return;
  }
  check_guards();
}

// 0, 1, .. n - 1 as `order` says: 0 forward, 1 in reverse, else shuffled by that seed.
template <class T>
std::vector<T> ordered(T n, uint64_t order) {
  std::vector<T> numbers(static_cast<size_t>(n));
  std::iota(numbers.begin(), numbers.end(), T{0});
  if (order == 1) std::reverse(numbers.begin(), numbers.end());
  if (order > 1) std::shuffle(numbers.begin(), numbers.end(), std::mt19937_64(order));
  return numbers;
}

}  // namespace

std::string describe(Site at) {
  const char* slash = std::strrchr(at.file, '/');
  return std::string(slash ? slash + 1 : at.file) + ":" + std::to_string(at.line);
}

std::string describe(const Thread& thread) {
  return "block " + triple(block_index) + " thread " + std::to_string(block.number(thread));
}

void stop(const std::string& error) {
  if (block.error.empty()) block.error = error;
  for (;;) block.current->fiber.yield();
}

void fail(const char* what, Site at) {
  stop(std::string(what) + ": " + describe(*block.current) + " at " + describe(at));
}

int lane() {
  return static_cast<int>(thread_index.x & 31);
}

// Runs `run(params)` once per thread of the grid. Returns null, or what went wrong (valid until the
// next launch). Not for several threads at once.
extern "C" __attribute__((visibility("default"))) const char* fastattn_emulator_launch(
    void (*run)(const void*), const void* params, const unsigned* grid, unsigned threads,
    size_t shared, uint64_t order, int count_banks) {
  block.error.clear();
  if (stacks() == nullptr) return "no memory for the stacks of the emulated threads";
  kernel = run;
  kernel_params = params;
  grid_size = {grid[0], grid[1], grid[2]};
  block_size = {threads, 1, 1};
  block.threads = std::vector<Thread>(threads);
  block.warps = std::vector<Warp>(threads / 32);
  for (unsigned i = 0; i < threads; ++i) block.threads[i].index = {i, 0, 0};
  prepare_shared(shared, count_banks != 0);
  const auto threads_in_order = ordered<int>(static_cast<int>(threads), order);
  const auto rows = static_cast<uint64_t>(grid[1]) * grid[2];
  for (uint64_t number : ordered<uint64_t>(grid[0] * rows, order)) {
    block_index.x = static_cast<unsigned>(number % grid[0]);
    block_index.y = static_cast<unsigned>(number / grid[0] % grid[1]);
    block_index.z = static_cast<unsigned>(number / grid[0] / grid[1]);
    run_block(threads_in_order);
    if (!block.error.empty()) return block.error.c_str();
  }
  flush_bank_counts();
  return nullptr;
}

}  // namespace emulator
