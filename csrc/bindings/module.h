// What csrc/bindings/<op>.cpp needs: it defines `void bind_<op>(module_&)`, which setup.py's
// FASTATTN_BINDINGS(X) lists and module.cpp calls.
#pragma once

#include <pybind11/pybind11.h>

#include "bindings/tensor_caster.h"
#include "common/philox.h"

namespace fastattn {

// Dropout of probability p as torch passes it: rng_state is int64 [2], (seed, offset), or None.
inline Dropout dropout_from(const TensorView& rng_state, double p) {
  if (!rng_state || p <= 0) return {};
  const auto* state = rng_state.as<const uint64_t>();
  return {p, state[0], static_cast<uint32_t>(state[rng_state.stride[0]])};
}

}  // namespace fastattn
