// Cuts the backward of attention into parts for the threads; backward.h does the work.
#include "attention/backward.h"
#include "common/parallel.h"

namespace fastattn::FASTATTN_ISA {
namespace {

// One part per key head computes everything. Where that leaves threads idle, gradients of keys and
// of queries are computed apart, cut as finely as one likes, for 7 products in place of 5.
template <class Math>
void backward(const AttentionBackward& call) {
  const Problem p(call.in, call.rules);
  int64_t longest_q = 0, longest_k = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    longest_q = max(longest_q, p.sequence(b).q_len);
    longest_k = max(longest_k, p.sequence(b).k_len);
  }
  const int64_t heads = p.batch * p.kv_heads;
  if (heads == 0 || p.group == 0) return;
  const bool together = 7 * heads >= 5 * call.threads;
  const int64_t key_parts = together ? 1 : (longest_k + kBlockKeys - 1) / kBlockKeys;
  const int64_t query_parts = together ? 0 : (longest_q + kBlockQueries - 1) / kBlockQueries;
  const BackwardSizes<Math> sizes(p, longest_q, longest_k);

  const auto part_of = [&](int64_t index) {
    const int64_t h = index % heads, n = index / heads;
    const Sequence s = p.sequence(h / p.kv_heads);
    const Span queries{0, s.q_len}, keys{0, s.k_len};
    BackwardPart part{h / p.kv_heads, h % p.kv_heads, queries, keys, true, true};
    if (!together && n < key_parts) {
      part.keys = intersect(keys, {n * kBlockKeys, (n + 1) * kBlockKeys});
      part.of_queries = false;
    } else if (!together) {
      const int64_t m = query_parts - 1 - (n - key_parts);
      part.queries = intersect(queries, {m * kBlockQueries, (m + 1) * kBlockQueries});
      part.of_keys = false;
    }
    return part;
  };
  const int64_t count = heads * (key_parts + query_parts);
  parallel_for_each(count, call.threads, [&](int64_t index) {
    const BackwardPart part = part_of(index), next = part_of(min(index + call.threads, count - 1));
    const bool some = part.of_queries ? !part.queries.empty() || part.of_keys : !part.keys.empty();
    if (some) BackwardTask<Math>(call, p, sizes).run(part, next);
  });
}

void backward_any(const AttentionBackward& call) {
  if (call.in.q.dtype == DType::float64) return backward<Float64Math>(call);
  backward<Float32Math>(call);
}

}  // namespace

extern const AttentionBackwardKernels attention_backward_kernels = {backward_any};

}  // namespace fastattn::FASTATTN_ISA
