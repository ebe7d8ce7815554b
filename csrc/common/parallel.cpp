#include "common/parallel.h"

#include <dlfcn.h>

#include <exception>
#include <mutex>

namespace fastattn {
namespace {

// The entry points of GNU's OpenMP run-time, which LLVM's and Intel's offer as well.
using Parallel = void (*)(void (*)(void*), void*, unsigned threads, unsigned flags);
using MaxThreads = int (*)();

Parallel g_parallel = nullptr;
MaxThreads g_max_threads = nullptr;

struct Team {
  void (*body)(void*);
  void* context;
  std::mutex mutex;
  std::exception_ptr error;
};

void run_member(void* pointer) {
  Team& team = *static_cast<Team*>(pointer);
  try {
    team.body(team.context);
  } catch (...) {
    const std::lock_guard<std::mutex> lock(team.mutex);
    team.error = std::current_exception();
  }
}

}  // namespace

bool connect_openmp() {
  // A look-up through this handle searches libtorch_cpu and the libraries it needs, nothing else.
  void* torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  if (torch == nullptr) return false;
  g_parallel = reinterpret_cast<Parallel>(dlsym(torch, "GOMP_parallel"));
  g_max_threads = reinterpret_cast<MaxThreads>(dlsym(torch, "omp_get_max_threads"));
  dlclose(torch);
  return g_parallel != nullptr && g_max_threads != nullptr;
}

int max_threads() {
  return g_max_threads == nullptr ? 1 : g_max_threads();
}

void run_team(int threads, void (*body)(void*), void* context) {
  if (threads <= 1 || g_parallel == nullptr) {
    body(context);
    return;
  }
  Team team{body, context, {}, nullptr};
  g_parallel(run_member, &team, static_cast<unsigned>(threads), 0);
  if (team.error) std::rethrow_exception(team.error);
}

}  // namespace fastattn
