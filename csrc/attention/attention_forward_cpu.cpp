// Cuts the forward of attention into chunks for the threads; forward.h does the work.
#include "attention/forward.h"
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

template <class Math>
void forward(const AttentionForward& call) {
  const Problem p(call.in, call.rules);
  const auto [longest_q, longest_k] = longest(p);
  if (p.batch == 0 || p.heads == 0 || longest_q == 0) return;
  const TensorView& mask = call.in.attn_mask;
  const bool same_mask = !mask || !is_key_mask(mask) || broadcast_stride(mask, 1) == 0;
  Cut cut(p, longest_q, same_mask, call.threads);
  const ForwardSizes<Math> sizes(p, cut.rows * cut.heads, longest_k);
  const int64_t count = cut.count(p, longest_q);
  parallel_for_each(count, call.threads, [&](int64_t index) {
    const ForwardChunk chunk = cut.chunk(p, index);
    const ForwardChunk next = cut.chunk(p, min(index + call.threads, count - 1));
    if (chunk.rows > 0) ForwardTask<Math>(call, p, sizes).run(chunk, next);
  });
}

void forward_any(const AttentionForward& call) {
  if (call.in.q.dtype == DType::float64) return forward<Float64Math>(call);
#if defined(__AVX512BF16__)
  // Weights that are returned are rounded once, not twice; few queries are bound by memory.
  const bool is_long = call.in.cu_seqlens_q || call.in.q.size[2] > kFewQueries;
  if (call.in.q.dtype == DType::bfloat16 && !call.weights && is_long)
    return forward<BFloat16Math>(call);
#endif
  forward<Float32Math>(call);
}

}  // namespace

extern const AttentionForwardKernels attention_forward_kernels = {forward_any};

}  // namespace fastattn::FASTATTN_ISA
