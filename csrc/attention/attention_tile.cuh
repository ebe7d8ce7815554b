// Tiles of attention, and how their operands come to shared memory.
//
// A block of 128 threads works on tiles of 64 x 64. Thread t owns the 4 x 8 elements
//   rows 4 * (t / 8) + i, i < 4;    columns 4 * (t % 8) + j % 4 + 32 * (j / 4), j < 8
// so a row lies in 8 neighbouring lanes. Operands are shared pieces of 8 KB, contraction index k
// first: 32 k of 64 numbers.
//
// A quad c of row k lies at place c ^ (k / 4 % 8). The transposing stores (8 lanes write 8 groups
// of 4 k at one c) and the reads (8 lanes read 8 quads of one k) then meet no bank twice. Pieces
// start at multiples of 8 KB, so the swizzle is one XOR of the address for every 4 k.
//
// Operands come from global memory a piece at a time, in quads, and widen to fp32 on the way. At
// the edges, and where columns are not contiguous or not aligned, elements are loaded one by one.
#pragma once

#include "attention/attention_params.cuh"
#include "common/vector.cuh"

namespace fa {

constexpr int kTile = 64;
constexpr int kPiece = 32;
constexpr int kAttentionThreads = 128;
constexpr unsigned kRowBytes = kTile * sizeof(float);
constexpr unsigned kPieceBytes = kPiece * kRowBytes;
constexpr unsigned kSwizzle = 4 * kRowBytes + 16;  // XORed once for every 4 k

using Fragment = float[4][8];  // what a thread owns of a tile

struct Lane {
  int thread, row_group, column_group;
  FA_DEVICE Lane()
      : thread(threadIdx.x), row_group(threadIdx.x >> 3), column_group(threadIdx.x & 7) {}
  FA_DEVICE int row(int i) const { return 4 * row_group + i; }
  FA_DEVICE int column(int j) const { return 4 * column_group + (j & 3) + 32 * (j >> 2); }
};

// The rows of one sequence and head.
template <class T>
struct Rows {
  T* data;  // [rows, columns]
  int row_stride, column_stride;
  int rows, columns;
  bool aligned;

  FA_DEVICE T* at(int row, int column) const {
    return data + static_cast<int64_t>(row) * row_stride +
           static_cast<int64_t>(column) * column_stride;
  }
  // Up to which column quads may be loaded from all 64 rows from `first` on.
  FA_DEVICE int whole_columns(int first) const {
    return aligned && first + kTile <= rows ? columns : 0;
  }
  // From a tile to the next.
  FA_DEVICE int64_t step() const { return kTile * static_cast<int64_t>(row_stride); }
};

template <class E>
FA_DEVICE Rows<E> rows_of(const Tensor4<E>& x, int batch, int head, int first, int rows,
                          int columns) {
  E* data = x.data + batch * x.batch + head * x.head + static_cast<int64_t>(first) * x.row;
  return {data, x.row, x.column, rows, columns, x.aligned != 0};
}

template <class T>
FA_DEVICE Rows<const T> read_only(const Rows<T>& x) {
  return {x.data, x.row_stride, x.column_stride, x.rows, x.columns, x.aligned};
}

// f(i, j) for all elements of a fragment.
template <class F>
FA_DEVICE void for_elements(F f) {
  FA_UNROLL
  for (int i = 0; i < 4; ++i) {
    FA_UNROLL
    for (int j = 0; j < 8; ++j) f(i, j);
  }
}

FA_DEVICE void clear(Fragment& x) {
  for_elements([&](int i, int j) { x[i][j] = 0; });
}

// Where element c of row k lies in a piece, in bytes.
FA_DEVICE unsigned piece_offset(int k, int c) {
  return ((c >> 2) * 16 ^ (k >> 2) * kSwizzle) + (k & 3) * kRowBytes + (c & 3) * 4;
}

template <class T>
FA_DEVICE float4 load_quad(const T* from) {
  float x[4];
  unpack<T, 4>(load_global<typename Word<4 * sizeof(T)>::type>(from), x);
  return make_float4(x[0], x[1], x[2], x[3]);
}

// x, of which the compiler knows nothing before this point: what depends on it is computed here,
// not ahead of loops, where it would occupy registers.
FA_DEVICE int not_before(int x) {
#ifndef FASTATTN_EMULATOR
  asm volatile("" : "+r"(x));
#endif
  return x;
}

// from[0..3] as fp32, zeros from from[left] on.
template <class T>
FA_DEVICE float4 load_some(const T* from, int stride, int left) {
  float4 quad = make_float4(0, 0, 0, 0);
  if (left > 0) quad.x = to_float(from[0]);
  if (left > 1) quad.y = to_float(from[stride]);
  if (left > 2) quad.z = to_float(from[2 * static_cast<int64_t>(stride)]);
  if (left > 3) quad.w = to_float(from[3 * static_cast<int64_t>(stride)]);
  return quad;
}

// Where a thread's part of rows begins that become ColumnPieces, or RowPieces.
template <class T>
FA_DEVICE const T* columns_start(const Rows<const T>& x, int first, const Lane& lane) {
  return x.at(first + 4 * lane.row_group, 4 * lane.column_group);
}
template <class T>
FA_DEVICE const T* rows_start(const Rows<const T>& x, int first, int column, const Lane& lane) {
  return x.at(first + (lane.thread >> 4), column + 4 * (lane.thread & 15));
}

// 32 columns of 64 rows, on their way to a piece with k = column. load() before the barrier that
// frees the piece, store() after it.
template <class T>
struct ColumnPiece {
  float4 quad[4];  // of rows 4 * row_group + i: columns 4 * column_group + 0..3

  FA_DEVICE void load(const Rows<const T>& x, const T* start, int first, int column,
                      int whole_columns, const Lane& lane) {
    if (column + kPiece <= whole_columns) {
      start += column;
      FA_UNROLL
      for (int i = 0; i < 4; ++i, start += x.row_stride) quad[i] = load_quad(start);
    } else {
      const int row_stride = not_before(x.row_stride), stride = not_before(x.column_stride);
      start += static_cast<int64_t>(column) * stride;
      const int rows = x.rows - first - 4 * lane.row_group;
      const int columns = x.columns - column - 4 * lane.column_group;
      FA_UNROLL
      for (int i = 0; i < 4; ++i, start += row_stride)
        quad[i] = load_some(start, stride, i < rows ? columns : 0);
    }
  }

  FA_DEVICE void store(char* piece, const Lane& lane) const {
    char* to = piece + piece_offset(4 * lane.column_group, 4 * lane.row_group);
    store_shared(to, make_float4(quad[0].x, quad[1].x, quad[2].x, quad[3].x));
    store_shared(to + kRowBytes, make_float4(quad[0].y, quad[1].y, quad[2].y, quad[3].y));
    store_shared(to + 2 * kRowBytes, make_float4(quad[0].z, quad[1].z, quad[2].z, quad[3].z));
    store_shared(to + 3 * kRowBytes, make_float4(quad[0].w, quad[1].w, quad[2].w, quad[3].w));
  }
};

// 64 columns of 32 rows, with k = row. Bit r of `visible`: row r counts, otherwise it is zeros.
template <class T>
struct RowPiece {
  float4 quad[4];  // of rows thread / 16 + 8 * i: columns 4 * (thread % 16) + 0..3

  FA_DEVICE void load(const Rows<const T>& x, const T* start, int column, unsigned visible,
                      const Lane& lane) {
    if (x.aligned && visible == ~0u && column + kTile <= x.columns) {
      const int64_t step = 8 * static_cast<int64_t>(x.row_stride);
      FA_UNROLL
      for (int i = 0; i < 4; ++i, start += step) quad[i] = load_quad(start);
    } else {
      const int64_t step = 8 * static_cast<int64_t>(not_before(x.row_stride));
      const int stride = not_before(x.column_stride);
      const int columns = x.columns - column - 4 * (lane.thread & 15);
      visible >>= lane.thread >> 4;
      FA_UNROLL
      for (int i = 0; i < 4; ++i, start += step)
        quad[i] = load_some(start, stride, visible >> 8 * i & 1 ? columns : 0);
    }
  }

  FA_DEVICE void store(char* piece, const Lane& lane) const {
    const unsigned to = piece_offset(lane.thread >> 4, 4 * (lane.thread & 15));
    FA_UNROLL
    for (int i = 0; i < 4; ++i) store_shared(piece + (to ^ 2 * i * kSwizzle), quad[i]);
  }
};

}  // namespace fa
