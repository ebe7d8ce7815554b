// A gradient that products are added up to: in scratch memory first, the last product straight to
// where the gradient lies if it can, so that its stores hide behind the products.
#pragma once

#include "attention/microkernel.h"
#include "attention/pack.h"

namespace fastattn::FASTATTN_ISA {

// Where the sums of some rows are: not begun, in scratch memory, or where the gradient lies.
enum class Place : uint8_t { nowhere, scratch, there };

// Rows are counted from the sums' begin in scratch memory, and `first` from the gradient's.
template <class Sum>
class Gradient {
 public:
  // sums[rows][stride], of which `columns` are the gradient's, once they are multiplied by factor.
  Gradient(const Matrix& to, Sum* sums, int64_t columns, int64_t stride, Sum factor)
      : to_(to),
        sums_(sums),
        columns_(columns),
        stride_(stride),
        factor_(factor),
        takes_products_(to.dtype == kDTypeOf<Sum> && columns == stride && factor == 1) {}

  // For a product of rows from `row` on, whose sums so far are at `place`.
  Target<Sum> target(int64_t row, Place place, bool is_last, int64_t first) const {
    Target<Sum> target = sum_in(sums_ + row * stride_, stride_, place == Place::nowhere);
    if (is_last && takes_products_) {
      target.to = to_.at<Sum>(first);
      target.to_stride = to_.row_stride;
    }
    return target;
  }

  // Brings rows to where they belong, unless the last product did.
  void store_rows(int64_t row, Place place, int64_t first, int64_t rows) const {
    if (place == Place::there && takes_products_) return;
    const Sum* from = sums_ + row * stride_;
    visit_storage<Sum>(to_.dtype, [&](auto type) {
      for (int64_t n = 0; n < rows; ++n, from += stride_) {
        auto* out = to_.at<decltype(type)>(first + n);
        const auto value = [&](int64_t d) __attribute__((always_inline)) {
          return place == Place::nowhere ? Vec<Sum>{} : load<Sum>(from + d) * factor_;
        };
        int64_t d = 0;
        for (; d + kLanes<Sum> <= columns_; d += kLanes<Sum>) store(out + d, value(d));
        if (d < columns_) store_partial(out + d, value(d), columns_ - d);
      }
    });
  }

 private:
  Matrix to_;
  Sum* sums_;
  int64_t columns_, stride_;
  Sum factor_;
  bool takes_products_;
};

}  // namespace fastattn::FASTATTN_ISA
