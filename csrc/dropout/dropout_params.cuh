#pragma once

#include "common/dropout_params.cuh"

namespace fa {

template <class T>
struct DropoutParamsOf {
  const T* x;  // [rows, columns] contiguous
  T* out;      // the same
  DropoutParams dropout;
  int64_t rows;
  int64_t columns;
};

}  // namespace fa
