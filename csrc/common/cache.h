// The size of the machine's caches.
#pragma once

#include <cstdint>

namespace fastattn {

// Bytes of the last-level cache that this CPU's cores share; 0 if unknown.
int64_t last_cache_bytes();

}  // namespace fastattn
