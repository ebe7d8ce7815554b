// Shared memory with NaN, guard gaps, a race check, and a count of bank conflicts.
//
// Two accesses of the same bytes by different threads race if at least one of them stores another
// value and nothing orders them: no __syncthreads between them, nor, within a warp, a collective.
#include <algorithm>
#include <map>
#include <tuple>

#include "emulator/state.h"

#ifdef FASTATTN_EMULATOR_ASAN
#include <sanitizer/asan_interface.h>
#define FASTATTN_POISON(p, n) __asan_poison_memory_region(p, n)
#define FASTATTN_UNPOISON(p, n) __asan_unpoison_memory_region(p, n)
#else
#define FASTATTN_POISON(p, n) (void)0
#define FASTATTN_UNPOISON(p, n) (void)0
#endif

namespace emulator {
namespace {

constexpr size_t kGuard = 64;
constexpr int kMaxArrays = 32;
constexpr size_t kGranule = 2;  // bytes that the race check tells apart
constexpr int16_t kNobody = -1, kSeveral = -2;

// The last store and the last load of a granule, and when: at which barrier, at which meeting.
struct Shadow {
  uint32_t store_barrier = 0, store_meeting = 0, load_barrier = 0, load_meeting = 0;
  int16_t storer = kNobody, loader = kNobody, loading_warp = kNobody;
  int16_t array = 0;     // 1, 2, .. or 0 in a gap
  bool pending = false;  // a cp.async to it has not been waited for
};

struct Array {
  size_t begin, bytes;
};

struct SharedMemory {
  std::vector<unsigned char> memory;
  unsigned char* base = nullptr;
  size_t bytes = 0;
  std::vector<Shadow> shadow;
  std::vector<Array> arrays;  // as taken by whichever thread came first
} shared;

size_t padded(size_t bytes) {
  return (bytes + 15) / 16 * 16;
}

// ---- bank conflicts: the addresses of a warp's n-th access at a source line, since they last met
struct WarpAccess {
  std::vector<std::pair<size_t, size_t>> lanes;  // (offset, size)
};
using AccessKey = std::tuple<std::string, int, int, int, uint32_t, uint32_t, uint32_t>;
struct SiteKey {
  std::string file;
  int line, is_store, size;
  bool operator<(const SiteKey& o) const {
    return std::tie(file, line, is_store, size) < std::tie(o.file, o.line, o.is_store, o.size);
  }
};
struct Count {
  uint64_t accesses = 0, wavefronts = 0, needed = 0;
};

bool counting = false;
std::map<AccessKey, WarpAccess> open_accesses;
std::map<std::tuple<std::string, int, int, int>, uint32_t> times;  // by site, thread
std::map<SiteKey, Count> counts;
std::string report;

// Wavefronts of one warp access: 32 banks of 4 bytes; a bank gives one word (to any lanes) at a
// time. 8-byte accesses are served by half warps, 16-byte ones by quarters.
int wavefronts(const WarpAccess& access, size_t size) {
  const size_t group = size == 16 ? 8 : size == 8 ? 16 : 32;
  int total = 0;
  for (size_t first = 0; first < access.lanes.size(); first += group) {
    std::vector<size_t> words[32];
    const size_t end = std::min(first + group, access.lanes.size());
    for (size_t i = first; i < end; ++i) {
      const auto [offset, bytes] = access.lanes[i];
      for (size_t word = offset / 4; word <= (offset + bytes - 1) / 4; ++word) {
        auto& bank = words[word % 32];
        if (std::find(bank.begin(), bank.end(), word) == bank.end()) bank.push_back(word);
      }
    }
    size_t most = 1;
    for (const auto& bank : words) most = std::max(most, bank.size());
    total += static_cast<int>(most);
  }
  return total;
}

void note_banks(Access access, size_t offset, size_t size, Site at) {
  const Thread& self = *block.current;
  const int number = block.number(self), is_store = access == Access::store;
  const uint32_t nth = times[{at.file, at.line, is_store, number}]++;
  open_accesses[{at.file, at.line, is_store, number / 32, block.barriers, self.meetings, nth}]
      .lanes.emplace_back(offset, size);
}

}  // namespace

void flush_bank_counts() {
  for (const auto& [key, access] : open_accesses) {
    const size_t size = access.lanes[0].second;
    Count& count =
        counts[{std::get<0>(key), std::get<1>(key), std::get<2>(key), static_cast<int>(size)}];
    const size_t group = size == 16 ? 8 : size == 8 ? 16 : 32;
    ++count.accesses;
    count.wavefronts += static_cast<uint64_t>(wavefronts(access, size));
    count.needed += (access.lanes.size() + group - 1) / group;
  }
  open_accesses.clear();
  times.clear();
}

// Lines "file:line load|store bytes accesses wavefronts needed" of the launches counted so far.
extern "C" __attribute__((visibility("default"))) const char* fastattn_emulator_bank_report() {
  report.clear();
  for (const auto& [site, count] : counts)
    report += describe(Site{site.file.c_str(), site.line}) +
              (site.is_store ? " store " : " load ") + std::to_string(site.size) + " " +
              std::to_string(count.accesses) + " " + std::to_string(count.wavefronts) + " " +
              std::to_string(count.needed) + "\n";
  counts.clear();
  return report.c_str();
}

void prepare_shared(size_t bytes, bool count_banks) {
  counting = count_banks;
  open_accesses.clear();
  times.clear();
  if (!shared.memory.empty()) FASTATTN_UNPOISON(shared.memory.data(), shared.memory.size());
  shared.bytes = bytes;
  shared.memory.assign(bytes + kMaxArrays * (kGuard + 16) + 128, 0xff);
  const auto start = reinterpret_cast<uintptr_t>(shared.memory.data());
  shared.base = shared.memory.data() + (128 - start % 128) % 128;
}

void poison_shared() {
  if (counting) flush_bank_counts();
  FASTATTN_UNPOISON(shared.memory.data(), shared.memory.size());
  std::fill(shared.memory.begin(), shared.memory.end(), 0xff);
  shared.shadow.assign(shared.memory.size() / kGranule, {});
  shared.arrays.clear();
}

void* take_shared(size_t bytes, size_t taken, int arrays) {
  if (taken + padded(bytes) > shared.bytes)
    stop("shared memory: " + describe(*block.current) + " takes " +
         std::to_string(taken + padded(bytes)) + " bytes, the launch gave " +
         std::to_string(shared.bytes));
  if (arrays >= kMaxArrays) stop("shared memory: more than 32 arrays");
  const size_t begin = taken + static_cast<size_t>(arrays) * kGuard;
  if (arrays < static_cast<int>(shared.arrays.size())) {
    if (shared.arrays[arrays].begin != begin || shared.arrays[arrays].bytes != bytes)
      stop("shared memory: " + describe(*block.current) + " divides it in another way");
  } else {
    shared.arrays.push_back({begin, bytes});
    const auto id = static_cast<int16_t>(shared.arrays.size());
    for (size_t i = 0; i < bytes / kGranule; ++i) shared.shadow[begin / kGranule + i].array = id;
    FASTATTN_POISON(shared.base + begin + bytes, padded(bytes) - bytes + kGuard);
  }
  return shared.base + begin;
}

// A plain store that no wrapper saw has run past the end of an array.
void check_guards() {
#ifndef FASTATTN_EMULATOR_ASAN
  for (size_t i = 0; i < shared.arrays.size(); ++i) {
    const Array& array = shared.arrays[i];
    const unsigned char* end = shared.base + array.begin + array.bytes;
    const size_t gap = padded(array.bytes) - array.bytes + kGuard;
    if (std::all_of(end, end + gap, [](unsigned char c) { return c == 0xff; })) continue;
    block.error = "shared-memory overrun: " + describe(block.threads[0]) +
                  "'s block has written past the end of array " + std::to_string(i + 1) + " (" +
                  std::to_string(array.bytes) + " bytes)";
    return;
  }
#endif
}

namespace {

[[noreturn]] void race(const char* what, int16_t other, Site at) {
  stop("shared-memory race: " + describe(*block.current) + " at " + describe(at) + " " + what +
       (other >= 0 ? " thread " + std::to_string(other) : std::string(" other threads")) +
       ", with no barrier between them");
}

bool races(int16_t other, uint32_t barrier, uint32_t meeting) {
  const Thread& self = *block.current;
  const int number = block.number(self);
  if (other < 0 || other == number || barrier != block.barriers) return false;
  return other / 32 != number / 32 || meeting == self.meetings;
}

void note_load(Shadow& s, Site at) {
  if (s.pending) fail("cp.async not waited for: a load of what it copies", at);
  if (races(s.storer, s.store_barrier, s.store_meeting))
    race("loads what was stored by", s.storer, at);
  const Thread& self = *block.current;
  const auto number = static_cast<int16_t>(block.number(self));
  const auto warp = static_cast<int16_t>(number / 32);
  if (s.load_barrier != block.barriers) {
    s.loader = number;
    s.loading_warp = warp;
  } else {
    if (s.loading_warp != warp) s.loading_warp = kSeveral;
    if (s.loader != number) s.loader = s.load_meeting == self.meetings ? kSeveral : number;
  }
  s.load_barrier = block.barriers;
  s.load_meeting = self.meetings;
}

void note_store(Shadow& s, Site at) {
  if (races(s.storer, s.store_barrier, s.store_meeting))
    race("overwrites what was stored by", s.storer, at);
  const Thread& self = *block.current;
  const auto number = static_cast<int16_t>(block.number(self));
  if (s.load_barrier == block.barriers && s.loading_warp != kNobody) {
    const bool other_warp = s.loading_warp != number / 32;
    if (other_warp || (s.loader != number && s.load_meeting == self.meetings))
      race("overwrites what is loaded by", s.loader, at);
  }
  s.storer = number;
  s.store_barrier = block.barriers;
  s.store_meeting = self.meetings;
}

}  // namespace

void mark_pending(const void* address, size_t size, bool pending) {
  const auto offset = static_cast<size_t>(static_cast<const unsigned char*>(address) - shared.base);
  for (size_t i = 0; i < size; i += kGranule)
    shared.shadow[(offset + i) / kGranule].pending = pending;
}

void note_shared_store(void* address, size_t size, const void* value, Site at) {
  const size_t offset = static_cast<size_t>(static_cast<unsigned char*>(address) - shared.base);
  for (size_t i = 0; i < size; i += kGranule) {
    const auto* now = static_cast<const unsigned char*>(address) + i;
    if (std::memcmp(now, static_cast<const unsigned char*>(value) + i, kGranule) != 0)
      note_store(shared.shadow[(offset + i) / kGranule], at);
  }
}

void touch_shared(Access access, const void* address, size_t size, const void* value, Site at) {
  const auto* bytes = static_cast<const unsigned char*>(address);
  if (bytes < shared.base || bytes + size > shared.memory.data() + shared.memory.size())
    fail("shared-memory overrun: an access outside shared memory", at);
  const auto offset = static_cast<size_t>(bytes - shared.base);
  check_aligned(address, size, "misaligned access to shared memory", at);
  Shadow* shadow = &shared.shadow[offset / kGranule];
  if (shadow[0].array == 0 || shadow[(size - 1) / kGranule].array != shadow[0].array)
    fail("shared-memory overrun: an access outside the array", at);
  if (counting) note_banks(access, offset, size, at);
  if (access == Access::store)
    note_shared_store(const_cast<void*>(address), size, value, at);
  else
    for (size_t i = 0; i < size; i += kGranule) note_load(shadow[i / kGranule], at);
}

}  // namespace emulator
