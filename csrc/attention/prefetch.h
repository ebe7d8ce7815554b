// Brings rows that a thread reads next into its second-level cache while it computes. (Rows to be
// written are left alone: their pages may not exist yet, and then a prefetch costs more than it
// saves.)
#pragma once

#include "attention/problem.h"

namespace fastattn::FASTATTN_ISA {

// After begin(steps), add the rows, then call step() about `steps` times. The rows are asked for a
// few at a time in the last of those steps, so that they aren't evicted before they are read.
class Prefetcher {
 public:
  void begin(int64_t steps) {
    count_ = 0;
    steps_ = max<int64_t>(steps, 1);
    wait_ = steps_;
  }

  // Rows [first, first + rows) of m, `columns` wide; at most five calls.
  void add(const Matrix& m, int64_t first, int64_t rows, int64_t columns) {
    const int64_t size = m.dtype == DType::float64 ? 8 : m.dtype == DType::float32 ? 4 : 2;
    if (m.column_stride != 1 || rows <= 0) return;
    part_[count_++] = {static_cast<const char*>(m.data) + first * m.row_stride * size,
                       m.row_stride * size, columns * size, rows, (rows + steps_ - 1) / steps_};
    wait_ = max<int64_t>(min(wait_, steps_ - rows - steps_ / 8), 0);
  }

  FASTATTN_INLINE void step() {
    if (wait_ > 0) {
      --wait_;
      return;
    }
    for (int n = 0; n < count_; ++n) {
      Part& part = part_[n];
      const int64_t rows = min(part.rows, part.rows_per_step);
      for (int64_t r = 0; r < rows; ++r, part.row += part.stride) {
        for (int64_t byte = 0; byte < part.bytes; byte += 64)
          __builtin_prefetch(part.row + byte, 0, 2);
      }
      part.rows -= rows;
    }
  }

 private:
  struct Part {
    const char* row;
    int64_t stride, bytes, rows, rows_per_step;
  };
  Part part_[5];
  int count_ = 0;
  int64_t steps_ = 1, wait_ = 0;
};

}  // namespace fastattn::FASTATTN_ISA
