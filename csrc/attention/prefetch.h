// Brings rows that a thread reads next into its second-level cache while it computes. (Rows to be
// written are left alone: their pages may not exist yet, and then a prefetch costs more than it
// saves.)
#pragma once

#include "attention/problem.h"

namespace fastattn::FASTATTN_ISA {

// Add the rows, then call step() as often as announced: each call asks for its share of them.
class Prefetcher {
 public:
  void clear() { count_ = 0; }

  // Rows [first, first + rows) of m, `columns` wide; at most five calls.
  void add(const Matrix& m, int64_t first, int64_t rows, int64_t columns, int64_t steps) {
    const int64_t size = m.dtype == DType::float64 ? 8 : m.dtype == DType::float32 ? 4 : 2;
    if (m.column_stride != 1 || rows <= 0) return;
    part_[count_++] = {static_cast<const char*>(m.data) + first * m.row_stride * size,
                       m.row_stride * size, columns * size, rows, (rows + steps - 1) / steps};
  }

  FASTATTN_INLINE void step() {
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
};

}  // namespace fastattn::FASTATTN_ISA
