// What the kernels over rows share: the threads that work on a row, the pieces of it that each of
// them holds, and vectors whose type is told when the kernel runs.
#pragma once

#include "common/philox.cuh"
#include "common/reduce.cuh"
#include "common/vector.cuh"

namespace fa {

// The threads that share a row: a warp, of which a block has four, or a block of 256.
template <int kSize>
struct Team {
  static constexpr int kThreads = kSize == 32 ? 128 : kSize;
  static constexpr int kRows = kThreads / kSize;  // that a block works on at a time

  int lane;
  float* scratch = nullptr;

  FA_DEVICE explicit Team(SharedMemory& shared) : lane(threadIdx.x % kSize) {
    if (kSize > 32) scratch = shared.take<float>(kSize / 32);
  }
  // A block's rows are first_row(), first_row() + row_step(), ..
  FA_DEVICE int64_t first_row() const {
    return static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.x / kSize;
  }
  FA_DEVICE int64_t row_step() const { return static_cast<int64_t>(gridDim.x) * kRows; }

  template <class Combine>
  FA_DEVICE float reduce(float x, Combine combine) const {
    if constexpr (kSize == 32) {
      return warp_reduce(x, combine);
    } else {
      return block_reduce<kSize>(x, scratch, combine);
    }
  }
  FA_DEVICE float sum(float x) const { return reduce(x, Sum()); }
  FA_DEVICE float max(float x) const { return reduce(x, Max()); }
};

// How a row of T's is divided: piece i of a thread is kColumns neighbouring columns from `first` +
// i * kStride on, where first = lane * kColumns. They are kChunk columns in all: the whole row, or,
// where it is longer and kWalks, one of the chunks that a team walks along.
template <class T, int kSize, bool kWalks>
struct Pieces {
  static constexpr int kColumns = kVector<T>;
  static constexpr int kHeld = kWalks ? 8 : kSize == 32 ? 32 : 16;  // columns of a thread
  static constexpr int kPieces = kHeld / kColumns;
  static constexpr int kStride = kSize * kColumns;
  static constexpr int kChunk = kSize * kHeld;
  static FA_DEVICE int end(int columns) { return kWalks ? columns : 1; }  // of a loop over chunks
};

// The thread's pieces of `row`, zeros from column `end` on (some whole accesses may go beyond it,
// never beyond `columns`). All accesses of an aligned row start before the first is waited for.
template <int kStride, int kPieces, int kColumns, class T>
FA_DEVICE void load_pieces(float (&out)[kPieces][kColumns], const T* row, int first, int end,
                           int columns) {
  constexpr int kBytes = access_bytes<T, kColumns>();
  constexpr int kEach = kBytes / static_cast<int>(sizeof(T)), kAccesses = kColumns / kEach;
  using Access = typename Word<kBytes>::type;
  if (is_aligned<kBytes>(row) && columns % kColumns == 0) {
    Access raw[kPieces][kAccesses];
    FA_UNROLL
    for (int i = 0; i < kPieces; ++i) {
      const int column = first + i * kStride;
      FA_UNROLL
      for (int j = 0; j < kAccesses; ++j)
        raw[i][j] = column < end ? load_global<Access>(row + column + j * kEach) : Access();
    }
    FA_UNROLL
    for (int i = 0; i < kPieces; ++i) {
      FA_UNROLL
      for (int j = 0; j < kAccesses; ++j) unpack<T, kEach>(raw[i][j], out[i] + j * kEach);
    }
  } else {
    FA_UNROLL
    for (int i = 0; i < kPieces; ++i) {
      const int column = first + i * kStride;
      load_row(out[i], row + column, end - column);
    }
  }
}

template <int kStride, int kPieces, int kColumns, class T>
FA_DEVICE void store_pieces(T* row, const float (&x)[kPieces][kColumns], int first, int columns) {
  FA_UNROLL
  for (int i = 0; i < kPieces; ++i) {
    const int column = first + i * kStride;
    store_row(row + column, x[i], columns - column);
  }
}

// Pieces where dropout keeps them, times its scale, else 0.
template <int kStride, int kPieces, int kColumns>
FA_DEVICE void drop_pieces(float (&x)[kPieces][kColumns], const Dropout& dropout, int64_t row,
                           int first, int columns) {
  static_assert(kColumns % 4 == 0, "a counter's words are for 4 columns");
  FA_UNROLL
  for (int i = 0; i < kPieces; ++i) {
    const int column = first + i * kStride;
    if (column >= columns) continue;
    FA_UNROLL
    for (int j = 0; j < kColumns; j += 4) {
      const uint4 words =
          dropout.words(static_cast<uint32_t>(column + j) / 4, static_cast<uint32_t>(row),
                        static_cast<uint32_t>(row >> 32));
      const uint32_t word[4] = {words.x, words.y, words.z, words.w};
      FA_UNROLL
      for (int k = 0; k < 4; ++k)
        x[i][j + k] = dropout.keeps(word[k]) ? x[i][j + k] * dropout.scale : 0.0f;
    }
  }
}

// Types by number, as fastattn/_cuda/rows.py has them.
enum ElementType : int32_t { kFloatType, kHalfType, kBfloat16Type };

// out[i] = p[start + i] for i < valid, else 0, p pointing to elements of `type`.
template <int N>
FA_DEVICE void load_any(float (&out)[N], const void* p, int type, int64_t start, int64_t valid) {
  if (type == kFloatType) {
    load_row(out, static_cast<const float*>(p) + start, valid);
  } else if (type == kHalfType) {
    load_row(out, static_cast<const __half*>(p) + start, valid);
  } else {
    load_row(out, static_cast<const __nv_bfloat16*>(p) + start, valid);
  }
}

FA_DEVICE void store_any(void* p, int type, int64_t index, float x) {
  if (type == kFloatType) {
    static_cast<float*>(p)[index] = x;
  } else if (type == kHalfType) {
    static_cast<__half*>(p)[index] = from_float<__half>(x);
  } else {
    static_cast<__nv_bfloat16*>(p)[index] = from_float<__nv_bfloat16>(x);
  }
}

}  // namespace fa
