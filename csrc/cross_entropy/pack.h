// Operands of the three products, brought into the order that multiply() reads.
#pragma once

#include "cross_entropy/chunk.h"

namespace fastattn::FASTATTN_ISA {

// Both layouts of a panel's tokens; lanes beyond the last token are 0.
template <class Math>
void pack_tokens(const Chunk<Math>& chunk, int64_t panel) {
  using Number = typename Math::Number;
  constexpr int64_t width = Chunk<Math>::kWidth, pack = Math::kPack;
  const int64_t dim = chunk.dim;
  const auto scratch = carve_scratch<BlockScratch<Math>>(int64_t{0}, dim, int64_t{0});
  auto* by_lane = reinterpret_cast<Number*>(chunk.tokens_by_lane(panel));
  for (int64_t lane = 0; lane < width; ++lane) {
    const bool exists = lane < chunk.lanes(panel);
    const Number* row = scratch.row;
    if (exists)
      row = load_row<Number>(chunk.p.hidden, chunk.hidden_rows, chunk.token(panel, lane),
                             scratch.row);
    for (int64_t d = 0; d < chunk.dim_units * pack; ++d)
      by_lane[(d / pack * width + lane) * pack + d % pack] = exists && d < dim ? row[d] : Number{};
    const int64_t t = panel * width + lane;
    for (int64_t d = 0; d < dim; d += width) {
      auto* by_row = reinterpret_cast<Number*>(chunk.tokens_by_row(d / width)) +
                     t / pack * width * pack + t % pack;
      for (int64_t i = 0; i < width; ++i)
        by_row[i * pack] = exists && d + i < dim ? row[d + i] : Number{};
    }
  }
}

template <class Number>
struct WeightRows {
  const Number* data;
  int64_t stride;
};

// Rows [c, c + n) of weight, in place or converted, with zeros up to a whole Unit.
template <class Math>
WeightRows<typename Math::Number> weight_rows(const Chunk<Math>& chunk, int64_t c, int64_t n,
                                              typename Math::Number* scratch) {
  using Number = typename Math::Number;
  const TensorView& weight = chunk.p.weight;
  if (chunk.is_in_place())
    return {weight.as<const Number>() + c * weight.stride[0], weight.stride[0]};
  const int64_t stride = chunk.dim_units * Math::kPack;
  for (int64_t i = 0; i < n; ++i) {
    Number* to = scratch + i * stride;
    const Number* row = load_row<Number>(weight, chunk.weight_rows, c + i, to);
    if (row != to) __builtin_memcpy(to, row, static_cast<size_t>(chunk.dim) * sizeof(Number));
    if (stride > chunk.dim) to[chunk.dim] = Number{};
  }
  return {scratch, stride};
}

// n rows of weight as [dim / kTileRows][n][kTileRows], for dhidden^T = weight^T dz^T.
template <class Math>
void pack_columns(const Chunk<Math>& chunk, const WeightRows<typename Math::Number>& weight,
                  int64_t n, typename Math::Unit* to) {
  using Number = typename Math::Number;
  constexpr int64_t pack = Math::kPack;
  const int64_t dim = chunk.dim, stride = BlockScratch<Math>::column_stride(n) * pack;
  for (int64_t i = 0; i < divide_up(n, pack) * pack; ++i) {
    const Number* from = weight.data + i * weight.stride;
    auto* tile = reinterpret_cast<Number*>(to) + i / pack * kTileRows * pack + i % pack;
    for (int64_t d = 0; d < dim; d += kTileRows, tile += stride) {
      if (i < n && dim - d >= kTileRows) {
        for (int j = 0; j < kTileRows; ++j) tile[j * pack] = from[d + j];
      } else {
        for (int64_t j = 0; j < min<int64_t>(dim - d, kTileRows); ++j)
          tile[j * pack] = i < n ? from[d + j] : Number{};
      }
    }
  }
}

// dz of a block of classes, as the two products want it. Plain numbers lie alike in both.
template <class Unit>
struct BlockGradient {
  const Unit *by_class, *by_token;     // [panel][class][lane], with classes or lanes as Units
  int64_t class_stride, token_stride;  // of the panels
};

template <class Math>
BlockGradient<typename Math::Unit> block_gradient(const Chunk<Math>& chunk, int64_t c, int64_t n,
                                                  const BlockScratch<Math>& scratch) {
  using C = typename Math::Sum;
  constexpr int64_t width = Chunk<Math>::kWidth;
  if constexpr (Math::kPack == 1) {
    const int64_t stride = chunk.classes * width;
    return {chunk.logits(0, c), chunk.logits(0, c), stride, stride};
  } else {
    const int64_t pairs = divide_up(n, 2);
    for (int64_t panel = 0; panel < chunk.panels; ++panel)
      for (int64_t pair = 0; pair < pairs; ++pair) {
        const C* z = chunk.logits(panel, c + 2 * pair);
        auto* by_class = scratch.by_class + (panel * pairs + pair) * width;
        auto* by_token =
            reinterpret_cast<bfloat16*>(scratch.by_token) + (panel * n + 2 * pair) * width;
        const bool is_whole = 2 * pair + 1 < n;
        for (int64_t h = 0; h < width; h += kLanes<C>) {
          const auto even = narrow(load<C>(z + h), bfloat16{});
          const auto odd = narrow(is_whole ? load<C>(z + width + h) : Vec<C>{}, bfloat16{});
          store(by_class + h, __builtin_convertvector(even, Vec<uint32_t>) |
                                  __builtin_convertvector(odd, Vec<uint32_t>) << 16);
          __builtin_memcpy(by_token + h, &even, sizeof even);
          if (is_whole) __builtin_memcpy(by_token + width + h, &odd, sizeof odd);
        }
      }
    return {scratch.by_class, scratch.by_token, pairs * width, n * width / 2};
  }
}

}  // namespace fastattn::FASTATTN_ISA
