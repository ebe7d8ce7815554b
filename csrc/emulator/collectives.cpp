// Barriers, meetings of lanes and asynchronous copies.
#include "emulator/state.h"

namespace emulator {

namespace {

bool same(Site a, Site b) {
  return a.line == b.line && std::strcmp(a.file, b.file) == 0;
}

std::string at(const char* name, Site site) {
  return std::string(name) + " at " + describe(site);
}

void wait(State state, const char* name, Site site) {
  Thread& self = *block.current;
  self.state = state;
  self.waits_for = name;
  self.waits_at = site;
  self.fiber.yield();
}

void complete(Collective& meeting, Warp& warp) {
  const auto first = static_cast<size_t>(&warp - block.warps.data()) * 32;
  for (int i = 0; i < 32; ++i) {
    if (!(meeting.mask >> i & 1)) continue;
    Thread& thread = block.threads[first + i];
    thread.state = State::ready;
    ++thread.meetings;
  }
}

// The meeting to join, or a free one made ready; fails where the lanes don't agree.
Collective& find_meeting(Warp& warp, const char* name, uint32_t mask, Site site) {
  Collective* free = nullptr;
  for (auto& known : warp.collectives) {
    Collective& meeting = *known;
    if (meeting.mask == 0) {
      free = &meeting;
      continue;
    }
    if (meeting.arrived == meeting.mask) continue;  // complete, some lanes have yet to read
    if (meeting.mask == mask) {
      if (std::strcmp(meeting.name, name) == 0 && same(meeting.at, site)) return meeting;
      stop("divergent warp collective: " + describe(*block.current) + " is in " + at(name, site) +
           ", another lane is in " + at(meeting.name, meeting.at));
    }
    // The other meeting may be an earlier or a later one of lanes that we need; not so if it needs
    // us as well.
    if (meeting.mask >> lane() & 1 && meeting.arrived & mask)
      stop("mask mismatch: " + describe(*block.current) + " is in " + at(name, site) +
           ", a lane of its mask in " + at(meeting.name, meeting.at) + " with another mask");
  }
  if (free == nullptr) {
    warp.collectives.push_back(std::make_unique<Collective>());
    free = warp.collectives.back().get();
  }
  free->name = name;
  free->at = site;
  free->mask = free->unread = mask;
  free->arrived = 0;
  return *free;
}

}  // namespace

void block_barrier(Site site) {
  if (block.at_barrier == 0) {
    block.barrier = site;
  } else if (!same(block.barrier, site)) {
    stop("divergent barrier: " + describe(*block.current) + " is in " + at("__syncthreads", site) +
         ", another thread in the one at " + describe(block.barrier));
  }
  if (block.running != static_cast<int>(block.threads.size()))
    stop("divergent barrier: threads have exited while " + describe(*block.current) + " is in " +
         at("__syncthreads", site));
  ++block.at_barrier;
  wait(State::at_barrier, "__syncthreads", site);
}

Collective& arrive(const char* name, uint32_t mask, const void* value, size_t size, Site site) {
  Thread& self = *block.current;
  Warp& warp = block.warp(self);
  const uint32_t me = 1u << lane();
  if (!(mask & me))
    stop("mask mismatch: " + describe(self) + " is in " + at(name, site) +
         " with a mask that lacks it");
  if (mask & warp.exited)
    stop("exited lane: " + describe(self) + " is in " + at(name, site) +
         " with a mask that names a lane which has exited");
  Collective& meeting = find_meeting(warp, name, mask, site);
  if (size) std::memcpy(meeting.values + lane() * size, value, size);
  meeting.arrived |= me;
  if (meeting.arrived == mask)
    complete(meeting, warp);
  else
    wait(State::in_collective, name, site);
  return meeting;
}

void leave(Collective& meeting) {
  meeting.unread &= ~(1u << lane());
  if (meeting.unread == 0) meeting.mask = 0;
}

void leave_warp(Thread& thread) {
  Warp& warp = block.warp(thread);
  const uint32_t me = 1u << lane();
  for (const auto& known : warp.collectives)
    if (known->mask & me && known->arrived != known->mask)
      stop("exited lane: " + describe(thread) + " exits while others wait for it in " +
           at(known->name, known->at));
  if (block.at_barrier > 0)
    stop("divergent barrier: " + describe(thread) + " exits while others wait in " +
         at("__syncthreads", block.barrier));
  warp.exited |= me;
}

void copy_async(void* to, const void* from, Site site) {
  check_aligned(to, 16, "misaligned cp.async destination", site);
  if (from != nullptr) check_aligned(from, 16, "misaligned cp.async source", site);
  unsigned char nan[16];
  std::memset(nan, 0xff, sizeof nan);
  touch_shared(Access::store, to, 16, nan, site);
  std::memcpy(to, nan, sizeof nan);
  mark_pending(to, sizeof nan, true);
  block.current->open_copies.push_back({to, from, site});
}

void commit_copies() {
  Thread& self = *block.current;
  self.copy_groups.push_back(std::move(self.open_copies));
  self.open_copies.clear();
}

void wait_for_copies(int pending) {
  auto& groups = block.current->copy_groups;
  for (; static_cast<int>(groups.size()) > pending; groups.pop_front()) {
    for (const Copy& copy : groups.front()) {
      unsigned char value[16] = {};
      if (copy.from != nullptr) std::memcpy(value, copy.from, sizeof value);
      mark_pending(copy.to, sizeof value, false);
      note_shared_store(copy.to, sizeof value, value, copy.at);
      std::memcpy(copy.to, value, sizeof value);
    }
  }
}

void finish_copies(Thread& thread) {
  const auto pending = [&](const std::vector<Copy>& copies) {
    if (!copies.empty())
      stop("cp.async never waited for: " + describe(thread) + ", " + at("cp.async", copies[0].at));
  };
  pending(thread.open_copies);
  for (const auto& group : thread.copy_groups) pending(group);
}

}  // namespace emulator
