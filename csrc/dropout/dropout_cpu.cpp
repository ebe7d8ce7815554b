// A piece of work is some rows, or part of a long one. Each element is read and written once:
// 2 sizeof(T) bytes, and one of Philox's words, 6 vector instructions a round for 8 columns each.
#include "dropout/dropout.h"

#include "common/parallel.h"
#include "common/row.h"
#include "common/scratch.h"

namespace fastattn::FASTATTN_ISA {
namespace {

// Longer rows are cut into parts of this many columns.
constexpr int64_t kPart = 4096;

template <class S>
struct PartScratch {
  S* x;
  explicit PartScratch(Carver& carver) : x(carver.take<S>(kPart)) {}
};

// Columns [first, first + n) of a row. x and out point at the first of them.
template <class S>
void drop_part(const S* x, S* out, const DropoutRow& row, int64_t first, int64_t n,
               Compute<S> scale) {
  using C = Compute<S>;
  for_each_block<C>(n, [&](int64_t j, auto block) {
    Vec<Int<C>> keep[kBlockVectors<C>];
    row.keep(first + j, keep);
    for (int i = 0; i < kBlockVectors<C>; ++i)
      block.store(out + j, i, keep[i] ? block.load(x + j, i) * scale : Vec<C>{});
  });
}

template <class S>
void forward(const DropoutForward& p) {
  const Rows rows(p.x);
  const int64_t size = p.x.last_size(), stride = p.x.last_stride();
  if (rows.count() == 0 || size == 0) return;
  const int64_t parts = (size + kPart - 1) / kPart;
  const auto scale = keep_scale<Compute<S>>(p.dropout);
  const int64_t grain = max<int64_t>(kPieceElements / min(size, kPart), 1);
  parallel_for_ranges(rows.count() * parts, grain, p.threads, [&](int64_t begin, int64_t end) {
    const auto scratch = carve_scratch<PartScratch<S>>();
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / parts, first = i % parts * kPart, n = min(size - first, kPart);
      const S* x = p.x.as<const S>() + rows.offset(row) + first * stride;
      if (stride != 1) {
        for (int64_t j = 0; j < n; ++j) scratch.x[j] = x[j * stride];
        x = scratch.x;
      }
      const DropoutRow numbers(p.dropout, static_cast<uint32_t>(row),
                               static_cast<uint32_t>(row >> 32));
      drop_part(x, p.out.as<S>() + row * size + first, numbers, first, n, scale);
    }
  });
}

void forward_any(const DropoutForward& p) {
  visit_float(p.x.dtype, [&](auto type) { forward<decltype(type)>(p); });
}

}  // namespace

extern const DropoutKernels dropout_kernels = {forward_any};

}  // namespace fastattn::FASTATTN_ISA
