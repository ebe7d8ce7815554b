// NVIDIA's driver, found when the program runs: loads cubins and launches their kernels. No CUDA
// library is linked and no CUDA header needed.
//
// Every function but why_not() throws std::runtime_error with the kernel's name and the driver's
// own words. Kernels run in a device's primary context, which is torch's; the caller's current
// context is as before when a function returns. Safe for several threads.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace fastattn::driver {

// One sentence why no kernel can run, or "" if a driver was found. FASTATTN_LIBCUDA names another
// library than libcuda.so.1.
std::string why_not();

// As the driver says it, 12090 for CUDA 12.9.
int version();

int device_count();

// 60 for sm_60.
int capability(int device);

// Whether a CUDA graph is being captured on a stream of `device`.
bool is_capturing(int device, uint64_t stream);

// Loads `function` (its name in the cubin) for all devices of the cubin's architecture. The result
// names it in launch(); `display_name` is what errors say. Kernels are never unloaded.
int load(const std::string& cubin, const std::string& function, const std::string& display_name);

struct Launch {
  unsigned grid[3];
  unsigned threads;
  unsigned shared;  // bytes
  uint64_t stream;
  std::string_view params;  // the kernel's one argument
};

void launch(int kernel, int device, const Launch& launch);

}  // namespace fastattn::driver
