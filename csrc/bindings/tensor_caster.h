// Lets a bound function take torch tensors (or None) as TensorView, with no torch header: through
// torch's DLPack exchange table where it has one (torch 2.10 and newer, some 30 ns a tensor), else
// through the tensor's Python attributes (some 300 ns).
#pragma once

#include <pybind11/pybind11.h>

#include "common/tensor_view.h"

namespace fastattn {

// Learns torch's dtypes, {torch.float32: 1, ...} by code, and its exchange table, a capsule or
// None.
void learn_torch(pybind11::dict dtype_codes, pybind11::object exchange_api);

// The tensor behind a Python object; throws if it isn't one or has more than kMaxDims dimensions.
TensorView view_tensor(pybind11::handle tensor);

}  // namespace fastattn

namespace pybind11::detail {

template <>
struct type_caster<fastattn::TensorView> {
  PYBIND11_TYPE_CASTER(fastattn::TensorView, const_name("torch.Tensor | None"));

  bool load(handle source, bool) {
    if (!source.is_none()) value = fastattn::view_tensor(source);
    return true;
  }
};

}  // namespace pybind11::detail
