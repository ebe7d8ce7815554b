// Tokens go through in chunks, and a chunk through the classes twice:
//
//   forward sweep    logits block by block, each folded into running maxima and sums as it is made
//   backward sweep   logits become their gradients block by block, and while these are in cache
//                    dhidden += dz weight and dweight += dz^T hidden
//
// weight is read in place. Groups of classes, which threads share out, depend on the sizes alone,
// and their sums are added in order.
//
// 6 T V D flops and 2 T V exponentials; bound by the multiply-add units. Moved from memory, a
// chunk: weight twice, dweight in and out, the logits in and out.
#include "cross_entropy/cross_entropy.h"

#include "common/parallel.h"
#include "cross_entropy/chunk.h"
#include "cross_entropy/losses.h"
#include "cross_entropy/pack.h"
#include "cross_entropy/tile.h"

namespace fastattn::FASTATTN_ISA {
namespace {

// Classes in a block of each sweep: with them, what a block needs stays in the second cache.
constexpr int64_t kForwardBlock = 8 * kTileRows;
constexpr int64_t kBackwardBlock = 16 * kTileRows;

// Fetches memory into the second cache, a part at each of `steps` steps.
class Ahead {
 public:
  template <class T>
  Ahead(const T* first, int64_t count, int64_t steps)
      : next_(reinterpret_cast<const char*>(first)),
        step_(first == nullptr ? 0 : count * static_cast<int64_t>(sizeof(T)) / steps) {}

  FASTATTN_INLINE void fetch() {
    for (int64_t byte = 0; byte < step_; byte += 64) __builtin_prefetch(next_ + byte, 0, 2);
    next_ += step_;
  }

 private:
  const char* next_;
  int64_t step_;
};

template <class Math>
void sweep_forward(const Chunk<Math>& chunk, int64_t group) {
  using Unit = typename Math::Unit;
  constexpr int64_t width = Chunk<Math>::kWidth;
  const auto [begin, end] = chunk.classes_of(group);
  const auto scratch = carve_scratch<BlockScratch<Math>>(kForwardBlock, chunk.dim, int64_t{0});
  clear_moments(chunk, group);
  for (int64_t c = begin; c < end; c += kForwardBlock) {
    const int64_t n = min(end - c, kForwardBlock);
    const auto [data, stride] = weight_rows(chunk, c, n, scratch.weight);
    const LeftOperand<Unit> weight{reinterpret_cast<const Unit*>(data), stride / Math::kPack, 1,
                                   chunk.dim_units};
    for (int64_t panel = 0; panel < chunk.panels; ++panel) {
      auto* z = chunk.p.factor ? chunk.logits(panel, c) : scratch.block;
      multiply<Math, 0>(n, weight, chunk.tokens_by_lane(panel), z, width, false);
      fold(chunk, group, panel, c, n, z);
    }
  }
}

// dhidden += dz weight for classes [c, c + n). What the `next` classes of the group will need is
// fetched from memory meanwhile.
template <class Math>
void add_hidden_gradient(const Chunk<Math>& chunk, int64_t group, int64_t c, int64_t n,
                         int64_t next, const BlockGradient<typename Math::Unit>& dz,
                         const typename Math::Unit* columns) {
  using Number = typename Math::Number;
  constexpr int64_t width = Chunk<Math>::kWidth;
  const TensorView& weight = chunk.p.weight;
  const int64_t dim = chunk.dim, tiles = divide_up(dim, kTileRows);
  const int64_t steps = divide_up(n, Math::kPack);
  const bool is_dense = chunk.is_in_place() && weight.stride[0] == dim;
  Ahead next_weight(is_dense ? weight.as<const Number>() + (c + n) * dim : nullptr, next * dim,
                    chunk.panels * tiles);
  for (int64_t panel = 0; panel < chunk.panels; ++panel) {
    Ahead next_logits(next > 0 ? chunk.logits(panel, c + n) : nullptr, next * width, tiles);
    for (int64_t tile = 0; tile < tiles; ++tile) {
      next_weight.fetch();
      next_logits.fetch();
      const int64_t d = tile * kTileRows;
      multiply<Math, 1>(
          min<int64_t>(dim - d, kTileRows),
          {columns + tile * BlockScratch<Math>::column_stride(n), 1, kTileRows, steps},
          dz.by_class + panel * dz.class_stride, chunk.partial(group, panel) + d * width, width,
          c > group * chunk.group_classes);
    }
  }
}

// dweight += dz^T hidden for classes [c, c + n).
template <class Math>
void add_weight_gradient(const Chunk<Math>& chunk, int64_t c, int64_t n,
                         const BlockGradient<typename Math::Unit>& dz, typename Math::Sum* block) {
  using C = typename Math::Sum;
  constexpr int64_t width = Chunk<Math>::kWidth, units = Chunk<Math>::kTokenUnits;
  const LeftOperand<typename Math::Unit> left{dz.by_token, units,        1,
                                              units,       chunk.panels, dz.token_stride};
  const bool add = chunk.first > 0;
  const int64_t dim = chunk.dim;
  C* grad = chunk.p.grad_weight.template as<C>() + c * dim;
  for (int64_t d = 0; d < dim; d += width) {
    const int64_t columns = min(dim - d, width);
    const auto* tokens = chunk.tokens_by_row(d / width);
    if (columns == width) {
      multiply<Math, units>(n, left, tokens, grad + d, dim, add);
      continue;
    }
    multiply<Math, units>(n, left, tokens, block, width, false);
    for (int64_t i = 0; i < n; ++i)
      for (int64_t j = 0; j < columns; ++j) {
        C& to = grad[i * dim + d + j];
        to = (add ? to : 0) + block[i * width + j];
      }
  }
}

template <class Math>
void sweep_backward(const Chunk<Math>& chunk, int64_t group) {
  const CrossEntropyRun& p = chunk.p;
  const auto [begin, end] = chunk.classes_of(group);
  const auto scratch = carve_scratch<BlockScratch<Math>>(kBackwardBlock, chunk.dim,
                                                         Math::kPack > 1 ? chunk.panels : 0);
  for (int64_t c = begin; c < end; c += kBackwardBlock) {
    const int64_t n = min(end - c, kBackwardBlock);
    for (int64_t panel = 0; panel < chunk.panels; ++panel) differentiate(chunk, panel, c, n);
    if (p.grad_bias) add_bias_gradient(chunk, c, n);
    const auto dz = block_gradient(chunk, c, n, scratch);
    if (p.grad_hidden) {
      pack_columns(chunk, weight_rows(chunk, c, n, scratch.weight), n, scratch.columns);
      add_hidden_gradient(chunk, group, c, n, min(end - c - n, kBackwardBlock), dz,
                          scratch.columns);
    }
    if (p.grad_weight) add_weight_gradient(chunk, c, n, dz, scratch.block);
  }
  if (p.grad_hidden && begin == end) {
    const int64_t count = chunk.panels * Chunk<Math>::kWidth * chunk.dim;
    __builtin_memset(chunk.partial(group, 0), 0,
                     static_cast<size_t>(count) * sizeof(typename Math::Sum));
  }
}

// The groups' parts of dhidden, added and turned back into rows.
template <class Math>
void finish_hidden(const Chunk<Math>& chunk, int64_t panel) {
  using C = typename Math::Sum;
  constexpr int64_t width = Chunk<Math>::kWidth;
  const auto scratch = carve_scratch<BlockScratch<Math>>(width, int64_t{0}, int64_t{0});
  for (int64_t d = 0; d < chunk.dim; d += width) {
    const int64_t columns = min(chunk.dim - d, width);
    for (int64_t j = 0; j < columns; ++j) {
      auto sum = Lanes<C>::at(chunk.partial(0, panel) + (d + j) * width);
      for (int64_t g = 1; g < chunk.groups; ++g) {
        const auto part = Lanes<C>::at(chunk.partial(g, panel) + (d + j) * width);
        for (int h = 0; h < 2; ++h) sum.half[h] += part.half[h];
      }
      sum.to(scratch.block + j * width);
    }
    for (int64_t lane = 0; lane < chunk.lanes(panel); ++lane) {
      for (int64_t j = 0; j < columns; ++j) scratch.sums[j] = scratch.block[j * width + lane];
      store_elements(scratch.sums, chunk.p.grad_hidden, chunk.token(panel, lane) * chunk.dim + d,
                     columns);
    }
  }
}

template <class Math>
void run(const CrossEntropyRun& p) {
  Chunk<Math> chunk(p);
  const auto for_each = [&](int64_t count, auto&& f) {
    parallel_for_each(count, p.threads, [&](int64_t i) { f(chunk, i); });
  };
  for (int64_t first = 0; first < p.tokens.size[0]; first += chunk.capacity) {
    chunk.begin_at(first);
    for_each(chunk.panels, pack_tokens<Math>);
    for_each(chunk.groups, sweep_forward<Math>);
    for_each(chunk.panels, finish_losses<Math>);
    if (!p.factor) continue;
    for_each(chunk.groups, sweep_backward<Math>);
    if (p.grad_hidden) for_each(chunk.panels, finish_hidden<Math>);
  }
}

void run_any(const CrossEntropyRun& p) {
  if (p.loss.dtype == DType::float64) return run<Plain<double>>(p);
#if defined(__AVX512BF16__)
  if (p.hidden.dtype == DType::bfloat16) return run<BFloat16Pairs>(p);
#endif
  run<Plain<float>>(p);
}

}  // namespace

extern const CrossEntropyKernels cross_entropy_kernels = {run_any};

}  // namespace fastattn::FASTATTN_ISA
