// One call of attention cut down to matrices: sizes, the rows of a sequence, the keys of a query.
#pragma once

#include "attention/attention.h"
#include "common/simd.h"

namespace fastattn::FASTATTN_ISA {

// Rows [0, length) of one head: element (i, d) is at data + i * row_stride + d * column_stride.
struct Matrix {
  void* data = nullptr;
  DType dtype = DType::none;
  int64_t row_stride = 0;
  int64_t column_stride = 0;

  template <class T>
  T* at(int64_t row) const {
    return static_cast<T*>(data) + row * row_stride;
  }
};

struct Sequence {
  int64_t q_begin, q_len, k_begin, k_len;
};

struct Span {
  int64_t begin, end;
  bool empty() const { return begin >= end; }
};

struct Problem {
  int64_t batch, heads, kv_heads, group;  // group: query heads per key head
  int64_t q_len, k_len;                   // of the padded form; totals of the packed one
  int64_t qk_dim, v_dim;
  const int32_t *cu_q, *cu_k;  // null: padded
  AttentionRules rules;

  Problem(const AttentionInputs& in, const AttentionRules& attention_rules)
      : batch(in.cu_seqlens_q ? in.cu_seqlens_q.size[0] - 1 : in.q.size[0]),
        heads(in.q.size[1]),
        kv_heads(in.k.size[1]),
        group(kv_heads > 0 ? heads / kv_heads : 0),
        q_len(in.q.size[2]),
        k_len(in.k.size[2]),
        qk_dim(in.q.size[3]),
        v_dim(in.v.size[3]),
        cu_q(in.cu_seqlens_q.as<const int32_t>()),
        cu_k(in.cu_seqlens_k.as<const int32_t>()),
        rules(attention_rules) {}

  Sequence sequence(int64_t b) const {
    if (cu_q == nullptr) return {0, q_len, 0, k_len};
    return {cu_q[b], cu_q[b + 1] - cu_q[b], cu_k[b], cu_k[b + 1] - cu_k[b]};
  }

  // The matrix of batch b and head h that begins at `row`; x is [B, H, L, D] or [1, H, T, D].
  Matrix matrix(const TensorView& x, int64_t b, int64_t h, int64_t row) const {
    if (!x) return {};
    const int64_t offset = (cu_q == nullptr ? b * x.stride[0] : 0) + h * x.stride[1];
    Matrix m{nullptr, x.dtype, x.stride[2], x.ndim == 4 ? x.stride[3] : 1};
    const int64_t bytes = x.dtype == DType::float64 ? 8 : x.dtype == DType::float32 ? 4 : 2;
    m.data = x.as<char>() + (offset + row * m.row_stride) * bytes;
    return m;
  }
};

// The keys that causal and window leave to a query.
class Diagonal {
 public:
  Diagonal(const AttentionRules& rules, const Sequence& s)
      : k_len_(s.k_len),
        shift_(rules.bottom_right ? s.k_len - s.q_len : 0),
        left_(rules.window_left < 0 ? kUnlimited : rules.window_left),
        right_(rules.window_right < 0 ? kUnlimited : rules.window_right) {
    if (rules.is_causal) right_ = min<int64_t>(right_, 0);
  }

  Span keys(int64_t i) const {
    return {min(max<int64_t>(i + shift_ - left_, 0), k_len_),
            max<int64_t>(min(i + shift_ + right_ + 1, k_len_), 0)};
  }

  // All keys that queries first .. last see; both ends grow with the query.
  Span keys(int64_t first, int64_t last) const { return {keys(first).begin, keys(last).end}; }

 private:
  static constexpr int64_t kUnlimited = int64_t{1} << 60;
  int64_t k_len_, shift_, left_, right_;
};

inline Span intersect(Span a, Span b) {
  return {max(a.begin, b.begin), min(a.end, b.end)};
}

}  // namespace fastattn::FASTATTN_ISA
