// A chunk of tokens: its sizes, and where everything of it lies.
//
// All comes in panels of kWidth tokens, one lane a token: logits [panel][class][lane]. So logits
// come out of one product and go into the next two as they lie, and softmax needs no sums across
// lanes. A piece of work for one thread is a group of classes.
#pragma once

#include "common/row.h"
#include "common/scratch.h"
#include "cross_entropy/cross_entropy.h"
#include "cross_entropy/tile.h"

namespace fastattn::FASTATTN_ISA {

FASTATTN_INLINE int64_t divide_up(int64_t n, int64_t by) {
  return (n + by - 1) / by;
}

// What the forward sweep keeps of each lane and group of classes: the sums are of exp(z - kMax),
// and of w (z - kMax) over classes whose weights add up to kWeight.
enum Moment { kMax, kSum, kWeighted, kWeight, kTarget, kMoments };
// dz_c = exp(z_c - kShift) kSlope - kOffset w_c - kPeak [c = t].
enum Coefficient { kShift, kSlope, kOffset, kPeak };

// One number for each of a panel's lanes.
template <class C>
struct Lanes {
  Vec<C> half[2];

  static FASTATTN_INLINE Lanes at(const C* p) { return {{load<C>(p), load<C>(p + kLanes<C>)}}; }
  FASTATTN_INLINE void to(C* p) const {
    store(p, half[0]);
    store(p + kLanes<C>, half[1]);
  }
};

struct Range {
  int64_t begin, end;
};

template <class Math>
struct Chunk {
  using C = typename Math::Sum;
  using Unit = typename Math::Unit;
  using Number = typename Math::Number;
  static constexpr int kPack = Math::kPack;
  static constexpr int64_t kWidth = kPanel<C>;
  static constexpr int64_t kTokenUnits = kWidth / kPack;  // a panel's tokens as an inner dimension

  explicit Chunk(const CrossEntropyRun& run)
      : p(run),
        hidden_rows(run.hidden),
        weight_rows(run.weight),
        classes(run.weight.size[0]),
        dim(run.weight.size[1]),
        dim_units(divide_up(dim, kPack)),
        capacity(run.packed.size[1]),
        groups(run.partial.size[0]),
        group_classes(divide_up(divide_up(classes, groups), kTileRows) * kTileRows) {}

  void begin_at(int64_t token) {
    first = token;
    tokens = min(p.tokens.size[0] - first, capacity);
    panels = divide_up(tokens, kWidth);
  }

  Range classes_of(int64_t group) const {
    const int64_t begin = min(group * group_classes, classes);
    return {begin, min(begin + group_classes, classes)};
  }
  int64_t lanes(int64_t panel) const { return min(tokens - panel * kWidth, kWidth); }
  int64_t token(int64_t panel, int64_t lane) const {
    return p.tokens.as<const int64_t>()[first + panel * kWidth + lane];
  }
  int64_t target(int64_t panel, int64_t lane) const {
    return p.target.as<const int64_t>()[token(panel, lane)];
  }
  C class_weight(int64_t c) const {
    return p.class_weight ? p.class_weight.as<const C>()[c] : C{1};
  }

  // f(lane, c - begin) for the lanes whose target c is one of the n classes from `begin` on.
  template <class F>
  void for_each_target(int64_t panel, int64_t begin, int64_t n, const F& f) const {
    for (int64_t lane = 0; lane < lanes(panel); ++lane) {
      const int64_t i = target(panel, lane) - begin;
      if (i >= 0 && i < n) f(lane, i);
    }
  }

  C* moment(int64_t group, int which, int64_t panel) const {
    return p.moments.as<C>() + (group * kMoments + which) * capacity + panel * kWidth;
  }
  C* coefficient(int which, int64_t panel) const { return moment(groups, which, panel); }
  C* logits(int64_t panel, int64_t c) const {
    return p.logits.as<C>() + (panel * classes + c) * kWidth;
  }
  // A group's part of dhidden^T: [panel][dim][lane].
  C* partial(int64_t group, int64_t panel) const {
    return p.partial.as<C>() + (group * capacity + panel * kWidth) * dim;
  }
  // hidden as [panel][dim][lane], for z^T = weight hidden^T.
  Unit* tokens_by_lane(int64_t panel) const {
    return p.packed.as<Unit>() + panel * dim_units * kWidth;
  }
  // hidden as [dim / kWidth][token][kWidth], for dweight = dz^T hidden.
  Unit* tokens_by_row(int64_t column_panel) const {
    return p.packed.as<Unit>() + capacity * p.packed.size[2] +
           column_panel * panels * kTokenUnits * kWidth;
  }

  // Whether the products read weight as it is.
  bool is_in_place() const {
    const TensorView& w = p.weight;
    return w.dtype == kDTypeOf<Number> && w.stride[1] == 1 && dim % kPack == 0 &&
           w.stride[0] % kPack == 0 && reinterpret_cast<uintptr_t>(w.data) % sizeof(Unit) == 0;
  }

  const CrossEntropyRun& p;
  const Rows hidden_rows, weight_rows;
  const int64_t classes, dim, dim_units, capacity, groups, group_classes;
  int64_t first = 0, tokens = 0, panels = 0;
};

// What a thread needs for a block of classes. A block of no classes serves work on tokens alone.
template <class Math>
struct BlockScratch {
  using C = typename Math::Sum;
  using Unit = typename Math::Unit;
  using Number = typename Math::Number;
  static constexpr int64_t kWidth = kPanel<C>, kPack = Math::kPack;

  Number *weight, *row;
  Unit *columns, *by_class, *by_token;
  C *block, *sums;

  BlockScratch(Carver& carver, int64_t classes, int64_t dim, int64_t panels)
      : weight(carver.take<Number>(classes * divide_up(dim, kPack) * kPack)),
        row(carver.take<Number>(dim)),
        columns(carver.take<Unit>(column_stride(classes) * divide_up(dim, kTileRows))),
        by_class(carver.take<Unit>(panels * divide_up(classes, kPack) * kWidth)),
        by_token(carver.take<Unit>(panels * classes * kWidth / kPack)),
        block(carver.take<C>(max(classes, kWidth) * kWidth)),
        sums(carver.take<C>(kWidth)) {}

  // Distance of the tiles that weight is cut into: a line further apart than they need. All in the
  // same sets of the cache, they would drive each other out.
  static constexpr int64_t column_stride(int64_t classes) {
    return divide_up(classes, kPack) * kTileRows + 64 / static_cast<int64_t>(sizeof(Unit));
  }
};

}  // namespace fastattn::FASTATTN_ISA
