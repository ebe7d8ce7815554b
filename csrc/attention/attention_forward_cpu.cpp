// Cuts the forward of attention into pieces for the threads; forward.h and decode.h do the work.
#include "attention/decode.h"
#include "attention/forward_weights.h"
#include "common/parallel.h"

namespace fastattn::FASTATTN_ISA {
namespace {

// How queries and heads are cut. The cut changes no result: a query never leaves its chunk.
struct Cut {
  int64_t rows, chunks;       // queries of a chunk, chunks of the longest sequence
  int64_t heads, head_parts;  // query heads of a chunk, of those that share a key head

  Cut(const Problem& p, int64_t longest_q, bool share_heads, int threads) {
    const int64_t dims = p.qk_dim + p.v_dim;
    rows = min<int64_t>(longest_q, dims <= 128 ? 512 : dims <= 256 ? 256 : 128);
    heads = share_heads ? min(p.group, max<int64_t>(1, 512 / longest_q)) : 1;
    while (count(p, longest_q) < 4 * threads && heads > 1) heads = (heads + 1) / 2;
    while (count(p, longest_q) < 4 * threads && rows > 64) rows = (rows + 1) / 2;
    count(p, longest_q);
  }

  int64_t count(const Problem& p, int64_t longest_q) {
    chunks = (longest_q + rows - 1) / rows;
    head_parts = (p.group + heads - 1) / heads;
    return p.batch * p.kv_heads * head_parts * chunks;
  }

  ForwardChunk chunk(const Problem& p, int64_t index) const {
    const int64_t last = chunks - 1 - index % chunks;  // the longest causal ones first
    index /= chunks;
    const int64_t part = index % head_parts;
    index /= head_parts;
    const int64_t b = index / p.kv_heads, kv_head = index % p.kv_heads;
    const int64_t q_len = p.sequence(b).q_len, first = last * rows;
    return {b,
            kv_head,
            kv_head * p.group + part * heads,
            min(heads, p.group - part * heads),
            first,
            min(rows, q_len - first)};
  }
};

Span longest(const Problem& p) {
  Span found{0, 0};
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence s = p.sequence(b);
    found = {max(found.begin, s.q_len), max(found.end, s.k_len)};
  }
  return found;
}

// Whether all query heads of a key head hide the same keys.
bool hides_same_keys(const TensorView& mask) {
  return !mask || !is_key_mask(mask) || broadcast_stride(mask, 1) == 0;
}

template <class Math>
void forward(const AttentionForward& call, const Problem& p, int64_t longest_q, int64_t longest_k) {
  Cut cut(p, longest_q, hides_same_keys(call.in.attn_mask), call.threads);
  const ForwardSizes<Math> sizes(p, cut.rows * cut.heads, longest_k);
  const int64_t count = cut.count(p, longest_q);
  parallel_for_each(count, call.threads, [&](int64_t index) {
    const ForwardChunk chunk = cut.chunk(p, index);
    const ForwardChunk next = cut.chunk(p, min(index + call.threads, count - 1));
    if (chunk.rows > 0) ForwardTask<Math>(call, p, sizes).run(chunk, next);
  });
}

template <class Math>
void decode(const AttentionForward& call, const Problem& p, int64_t longest_q, int64_t longest_k) {
  using Sum = typename Math::Sum;
  const DecodeSizes<Sum> sizes(p, longest_q, longest_k, hides_same_keys(call.in.attn_mask));
  Carver measure(nullptr);
  static_cast<void>(DecodeParts<Sum>(measure, p, sizes));
  const SharedScratch memory(measure.bytes());
  Carver carver(memory.data());
  const DecodeParts<Sum> parts(carver, p, sizes);
  const int64_t tasks = p.heads / sizes.heads;  // of a sequence and split
  parallel_for_each(p.batch * tasks * sizes.splits, call.threads, [&](int64_t index) {
    const int64_t head = index / sizes.splits % tasks * sizes.heads;
    DecodeTask<Math>(call, p, sizes, parts)
        .run(index / sizes.splits / tasks, head / p.group, head, index % sizes.splits);
  });
  parallel_for_ranges(p.batch * p.heads, 64, call.threads, [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) {
      const int64_t b = index / p.heads, queries = p.sequence(b).q_len;
      for (int64_t i = 0; i < queries; ++i)
        finish_decoding<Math>(call, p, sizes, parts, b, index % p.heads, i);
    }
  });
}

void forward_any(const AttentionForward& call) {
  const Problem p(call.in, call.rules);
  const auto [longest_q, longest_k] = longest(p);
  if (p.batch == 0 || p.heads == 0 || longest_q == 0) return;
  const bool is_double = call.in.q.dtype == DType::float64;
  if (longest_q <= kFewQueries && !call.weights) {
    const auto run = is_double ? decode<Float64Math> : decode<Float32Math>;
    return run(call, p, longest_q, longest_k);
  }
  auto run = is_double ? forward<Float64Math> : forward<Float32Math>;
#if defined(__AVX512BF16__)
  // Weights that are returned are rounded once, not twice.
  if (call.in.q.dtype == DType::bfloat16 && !call.weights) run = forward<BFloat16Math>;
#endif
  run(call, p, longest_q, longest_k);
}

}  // namespace

extern const AttentionForwardKernels attention_forward_kernels = {forward_any};

}  // namespace fastattn::FASTATTN_ISA
