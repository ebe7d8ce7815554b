#include "driver/driver.h"

#include <dlfcn.h>

#include <cstdlib>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <vector>

namespace fastattn::driver {
namespace {

// The driver's types and numbers (cuda.h), as far as they are used.
using Result = int;
using Device = int;
using Context = struct ContextTag*;
using Library = struct LibraryTag*;
using Kernel = struct KernelTag*;
using Function = struct FunctionTag*;
using Stream = struct StreamTag*;
constexpr Result kSuccess = 0;
enum Attribute {
  kMaxSharedPerBlock = 8,
  kCapabilityMajor = 75,
  kCapabilityMinor = 76,
  kMaxSharedPerBlockOptIn = 97,
};
constexpr int kFunctionMaxDynamicShared = 8;

// X(name, parameters) for every function used; the oldest driver that has all is of CUDA 12.0.
#define FASTATTN_DRIVER_FUNCTIONS(X)                                                          \
  X(cuInit, unsigned)                                                                         \
  X(cuDriverGetVersion, int*)                                                                 \
  X(cuGetErrorString, Result, const char**)                                                   \
  X(cuDeviceGetCount, int*)                                                                   \
  X(cuDeviceGetAttribute, int*, int, Device)                                                  \
  X(cuDevicePrimaryCtxRetain, Context*, Device)                                               \
  X(cuCtxGetCurrent, Context*)                                                                \
  X(cuCtxPushCurrent_v2, Context)                                                             \
  X(cuCtxPopCurrent_v2, Context*)                                                             \
  X(cuStreamIsCapturing, Stream, int*)                                                        \
  X(cuLibraryLoadData, Library*, const void*, int*, void**, unsigned, int*, void**, unsigned) \
  X(cuLibraryGetKernel, Kernel*, Library, const char*)                                        \
  X(cuKernelGetFunction, Function*, Kernel)                                                   \
  X(cuFuncSetAttribute, Function, int, int)                                                   \
  X(cuLaunchKernel, Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,     \
    unsigned, Stream, void**, void**)

struct Api {
#define FASTATTN_DECLARE_(name, ...) Result (*name)(__VA_ARGS__) = nullptr;
  FASTATTN_DRIVER_FUNCTIONS(FASTATTN_DECLARE_)
#undef FASTATTN_DECLARE_
  std::string problem;

  Api() {
    const char* chosen = std::getenv("FASTATTN_LIBCUDA");
    const std::string path = chosen != nullptr && *chosen != 0 ? chosen : "libcuda.so.1";
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      problem = "no NVIDIA driver was found (" + path + " can't be loaded)";
      return;
    }
#define FASTATTN_FIND_(name, ...)                                 \
  name = reinterpret_cast<decltype(name)>(dlsym(library, #name)); \
  if (name == nullptr && problem.empty())                         \
    problem = "NVIDIA's driver lacks " #name "; one for CUDA 12.0 or newer has it";
    FASTATTN_DRIVER_FUNCTIONS(FASTATTN_FIND_)
#undef FASTATTN_FIND_
    if (!problem.empty()) return;
    if (const Result result = cuInit(0); result != kSuccess)
      problem = "NVIDIA's driver does not start: " + words(result);
  }

  std::string words(Result result) const {
    const char* text = nullptr;
    if (cuGetErrorString(result, &text) == kSuccess && text != nullptr) return text;
    return "error " + std::to_string(result);
  }
};

const Api& found() {
  static const Api api;
  return api;
}

const Api& api() {
  if (!found().problem.empty()) throw std::runtime_error(found().problem);
  return found();
}

void check(Result result, const char* call, const std::string& what = "") {
  if (result == kSuccess) return;
  throw std::runtime_error((what.empty() ? "" : what + ": ") + call +
                           " failed: " + api().words(result));
}

struct DeviceState {
  Context context = nullptr;
  int capability = 0, max_shared = 0, default_max_shared = 0;
};

// The device's primary context and limits, asked for once.
const DeviceState& device_state(Device device) {
  static std::mutex mutex;
  static std::deque<DeviceState> states;
  const std::lock_guard lock(mutex);
  while (states.size() <= static_cast<size_t>(device)) states.emplace_back();
  DeviceState& state = states[device];
  if (state.context == nullptr) {
    const auto attribute = [&](int which) {
      int value = 0;
      check(api().cuDeviceGetAttribute(&value, which, device), "cuDeviceGetAttribute");
      return value;
    };
    state.capability = 10 * attribute(kCapabilityMajor) + attribute(kCapabilityMinor);
    state.default_max_shared = attribute(kMaxSharedPerBlock);
    state.max_shared = attribute(kMaxSharedPerBlockOptIn);
    if (state.max_shared < state.default_max_shared) state.max_shared = state.default_max_shared;
    check(api().cuDevicePrimaryCtxRetain(&state.context, device), "cuDevicePrimaryCtxRetain");
  }
  return state;
}

// Makes a device's context current for a scope.
class Current {
 public:
  explicit Current(const DeviceState& state) {
    Context now = nullptr;
    check(api().cuCtxGetCurrent(&now), "cuCtxGetCurrent");
    if (now == state.context) return;
    check(api().cuCtxPushCurrent_v2(state.context), "cuCtxPushCurrent");
    pushed_ = true;
  }
  ~Current() {
    Context popped;
    if (pushed_) found().cuCtxPopCurrent_v2(&popped);
  }
  Current(const Current&) = delete;

 private:
  bool pushed_ = false;
};

struct Loaded {
  std::string name;
  Kernel kernel = nullptr;
  struct PerDevice {
    Function function = nullptr;
    unsigned allowed_shared = 0;
  };
  std::vector<PerDevice> devices;
};

std::mutex kernels_mutex;
std::deque<Loaded> kernels;

// The kernel's function in the current context, that of `device`, allowed so many shared bytes.
Function function_for(int number, Device device, const DeviceState& state, unsigned shared,
                      std::string& name) {
  const std::lock_guard lock(kernels_mutex);
  Loaded& loaded = kernels.at(number);
  name = loaded.name;
  if (loaded.devices.size() <= static_cast<size_t>(device)) loaded.devices.resize(device + 1);
  Loaded::PerDevice& here = loaded.devices[device];
  if (here.function == nullptr) {
    check(api().cuKernelGetFunction(&here.function, loaded.kernel), "cuKernelGetFunction", name);
    here.allowed_shared = static_cast<unsigned>(state.default_max_shared);
  }
  if (shared > here.allowed_shared) {
    if (shared > static_cast<unsigned>(state.max_shared))
      throw std::runtime_error(name + " needs " + std::to_string(shared) +
                               " bytes of shared memory a block, device " + std::to_string(device) +
                               " has " + std::to_string(state.max_shared));
    check(api().cuFuncSetAttribute(here.function, kFunctionMaxDynamicShared,
                                   static_cast<int>(shared)),
          "cuFuncSetAttribute", name);
    here.allowed_shared = shared;
  }
  return here.function;
}

}  // namespace

std::string why_not() {
  return found().problem;
}

int version() {
  int number = 0;
  check(api().cuDriverGetVersion(&number), "cuDriverGetVersion");
  return number;
}

int device_count() {
  int count = 0;
  check(api().cuDeviceGetCount(&count), "cuDeviceGetCount");
  return count;
}

int capability(int device) {
  return device_state(device).capability;
}

bool is_capturing(int device, uint64_t stream) {
  const Current current(device_state(device));
  int status = 0;
  check(api().cuStreamIsCapturing(reinterpret_cast<Stream>(stream), &status),
        "cuStreamIsCapturing");
  return status != 0;
}

int load(const std::string& cubin, const std::string& function, const std::string& display_name) {
  Library library = nullptr;
  check(api().cuLibraryLoadData(&library, cubin.data(), nullptr, nullptr, 0, nullptr, nullptr, 0),
        "cuLibraryLoadData", display_name);
  Loaded loaded;
  loaded.name = display_name;
  check(api().cuLibraryGetKernel(&loaded.kernel, library, function.c_str()), "cuLibraryGetKernel",
        display_name);
  const std::lock_guard lock(kernels_mutex);
  kernels.push_back(std::move(loaded));
  return static_cast<int>(kernels.size()) - 1;
}

void launch(int kernel, int device, const Launch& launch) {
  const DeviceState& state = device_state(device);
  const Current current(state);
  std::string name;
  const Function function = function_for(kernel, device, state, launch.shared, name);
  void* arguments[] = {const_cast<char*>(launch.params.data())};
  check(api().cuLaunchKernel(function, launch.grid[0], launch.grid[1], launch.grid[2],
                             launch.threads, 1, 1, launch.shared,
                             reinterpret_cast<Stream>(launch.stream), arguments, nullptr),
        "cuLaunchKernel", name);
}

}  // namespace fastattn::driver
