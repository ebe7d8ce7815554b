// The queries of a part of the backward: q and dO as rows of whole panels, and what a row is known
// to have been in the forward.
//
//   delta_i = dO_i . out_i - dlse_i    (and sum_j dW_ij W_ij, which backward_scores.h adds)
//
// A row is addressed by its head g among those that share the key head, and its place r in the
// part. Bound by the bandwidth of memory: q, dO and out are read for the first time here.
#pragma once

#include "attention/backward_sizes.h"

namespace fastattn::FASTATTN_ISA {

template <class Math>
class BackwardRows {
  using Sum = typename Math::Sum;

 public:
  BackwardRows(const AttentionBackward& call, const Problem& problem,
               const BackwardSizes<Math>& sizes, const BackwardScratch<Sum>& scratch)
      : call_(call), problem_(problem), n_(sizes), scratch_(scratch) {}

  void begin(const BackwardPart& part) {
    part_ = part;
    sequence_ = problem_.sequence(part.batch);
    for (int64_t g = 0; g < problem_.group; ++g) {
      const Matrix q = matrix(call_.in.q, g);
      if (!in_place(q, n_.qk_dim, n_.qk_stride))
        pack_rows<Math>(q, part_.queries.begin, count(), n_.qk_dim, nullptr,
                        scratch_.q + row(g, 0) * n_.qk_stride, n_.qk_stride);
      begin_grad_out(g);
      begin_statistics(g);
    }
  }

  int64_t count() const { return part_.queries.end - part_.queries.begin; }
  int64_t row(int64_t g, int64_t r) const { return g * count() + r; }
  int64_t head(int64_t g) const { return part_.kv_head * problem_.group + g; }
  int64_t query(int64_t r) const { return part_.queries.begin + r; }

  // Rows r, r + 1, ... as they are multiplied.
  Operand<Sum> q(int64_t g, int64_t r) const {
    return rows(call_.in.q, scratch_.q, g, r, n_.qk_dim, n_.qk_stride);
  }
  Operand<Sum> grad_out(int64_t g, int64_t r) const {
    return rows(call_.grad_out, scratch_.grad_out, g, r, n_.v_dim, n_.v_stride);
  }

  Matrix matrix(const TensorView& x, int64_t g) const {
    return problem_.matrix(x, part_.batch, head(g), sequence_.q_begin);
  }

  // Whether rows can serve as the B of a product as they are: they lie in one piece of whole
  // panels.
  static bool in_place(const Matrix& m, int64_t columns, int64_t stride) {
    return is_operand<Math>(m, columns) && columns == stride && m.row_stride == columns;
  }

 private:
  Operand<Sum> rows(const TensorView& x, const Sum* packed, int64_t g, int64_t r, int64_t columns,
                    int64_t stride) const {
    if (x) {
      const Matrix m = matrix(x, g);
      if (in_place(m, columns, stride)) return as_operand<Math>(m, query(r));
    }
    return {packed + row(g, r) * stride, stride};
  }

  void begin_grad_out(int64_t g) {
    Sum* packed = scratch_.grad_out + row(g, 0) * n_.v_stride;
    if (!call_.grad_out) {
      __builtin_memset(packed, 0, static_cast<size_t>(count() * n_.v_stride) * sizeof(Sum));
      return;
    }
    const Matrix m = matrix(call_.grad_out, g);
    if (!in_place(m, n_.v_dim, n_.v_stride))
      pack_rows<Math>(m, part_.queries.begin, count(), n_.v_dim, nullptr, packed, n_.v_stride);
  }

  void begin_statistics(int64_t g) {
    const Matrix out = matrix(call_.out, g);
    const int64_t b = problem_.cu_q == nullptr ? part_.batch : 0;
    const auto statistic = [&](const TensorView& x, int64_t i) {
      return x.as<const Sum>()[b * x.stride[0] + head(g) * x.stride[1] +
                               (sequence_.q_begin + i) * x.stride[2]];
    };
    const Operand<Sum> grad = grad_out(g, 0);
    visit_storage<Sum>(out.dtype, [&](auto type) {
      using S = decltype(type);
      for (int64_t r = 0; r < count(); ++r) {
        const int64_t at = row(g, r), i = query(r);
        scratch_.lse[at] = statistic(call_.lse, i);
        scratch_.lse_low[at] = statistic(call_.lse_low, i);
        Vec<Sum> sum{};
        for (int64_t d = 0; d < n_.v_dim; d += kLanes<Sum>)
          sum += load_units<Math>(out.at<const S>(i), out.column_stride, d, n_.v_dim) *
                 load<Sum>(grad.data + r * grad.stride + d);
        scratch_.delta[at] = reduce_sum(sum);
        if (call_.grad_lse) scratch_.delta[at] -= statistic(call_.grad_lse, i);
      }
    });
  }

  const AttentionBackward& call_;
  const Problem& problem_;
  const BackwardSizes<Math>& n_;
  const BackwardScratch<Sum>& scratch_;
  BackwardPart part_{};
  Sequence sequence_{};
};

}  // namespace fastattn::FASTATTN_ISA
