// What the emulator knows of the running block; shared by its own files only.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "emulator/emulator.h"
#include "emulator/fiber.h"

namespace emulator {

enum class State : uint8_t { ready, in_collective, at_barrier, exited };

struct Copy {
  void* to;
  const void* from;  // null: zeros
  Site at;
};

struct Thread {
  Fiber fiber;
  Index index;
  State state = State::exited;
  Site waits_at;
  const char* waits_for = "";
  uint32_t meetings = 0;  // collectives completed; orders accesses within a warp
  std::vector<Copy> open_copies;
  std::deque<std::vector<Copy>> copy_groups;
};

struct Warp {
  uint32_t exited = 0;
  std::vector<std::unique_ptr<Collective>> collectives;  // those with mask 0 are free
};

struct Block {
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  Thread* current = nullptr;
  int running = 0;     // threads that have not exited
  int at_barrier = 0;  // threads waiting at `barrier`
  Site barrier;
  uint32_t barriers = 0;  // barriers passed in the whole launch
  std::string error;      // ends the launch

  int number(const Thread& thread) const { return static_cast<int>(&thread - threads.data()); }
  Warp& warp(const Thread& thread) { return warps[number(thread) / 32]; }
};

extern Block block;

std::string describe(const Thread& thread);
std::string describe(Site at);

// Sets the error if there is none yet, and goes back to the scheduler for good.
[[noreturn]] void stop(const std::string& error);

// collectives.cpp: `thread` is about to exit.
void leave_warp(Thread& thread);
void finish_copies(Thread& thread);

// shared_memory.cpp
void prepare_shared(size_t bytes, bool count_banks);
void poison_shared();
void check_guards();
void flush_bank_counts();
void mark_pending(const void* address, size_t size, bool pending);  // a cp.async to it
void note_shared_store(void* address, size_t size, const void* value, Site at);

}  // namespace emulator
