// The one product all attention kernels are made of, C[64][64] += A[64][32] B[32][64], in fp32.
//
// A block of 128 threads works on tiles of 64 x 64. Thread t owns the 4 x 8 elements
//   rows 4 * (t / 8) + i, i < 4;    columns 4 * (t % 8) + j % 4 + 32 * (j / 4), j < 8
// so a row lies in 8 neighbouring lanes. Operands are shared pieces of 8 KB, contraction index k
// first: 32 k of 64 numbers. Per k a thread reads 3 quads (16 bytes) for 32 multiply-adds.
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

// Columns [32 * kHalf, 32 * kHalf + 32) of a tile the block owns, to a piece with k = column.
// Rows change places in pairs: with x[i][j] allocated for this store, the a[i] it becomes then
// comes from another register bank (of 4 on sm_60) than the sum it is added to.
template <int kHalf>
FA_DEVICE void store_fragment(char* piece, const Fragment& x, const Lane& lane) {
  char* to = piece + piece_offset(4 * lane.column_group, 4 * lane.row_group);
  FA_UNROLL
  for (int j = 4 * kHalf; j < 4 * kHalf + 4; ++j, to += kRowBytes)
    store_shared(to, make_float4(x[1][j], x[0][j], x[3][j], x[2][j]));
}

// sum[r][c] += A[k][r] * B[k][c] over the 32 k of two pieces; kSwapped: A is from store_fragment.
template <bool kSwapped>
FA_DEVICE void multiply(Fragment& sum, const char* shared, unsigned a_piece, unsigned b_piece,
                        const Lane& lane) {
  const unsigned a_start = a_piece + 16 * lane.row_group;
  const unsigned b_start = b_piece + 16 * lane.column_group;
  FA_UNROLL_N(2)
  for (unsigned swizzle = 0; swizzle < 8 * kSwizzle; swizzle += kSwizzle) {
    const char *a_quad = shared + (a_start ^ swizzle), *b_quad = shared + (b_start ^ swizzle);
    FA_UNROLL
    for (int k = 0; k < 4; ++k, a_quad += kRowBytes, b_quad += kRowBytes) {
      const float4 u = load_shared<float4>(a_quad), v = load_shared<float4>(b_quad);
      const float4 w = load_shared<float4>(b_quad + kRowBytes / 2);
      const float a[4] = {kSwapped ? u.y : u.x, kSwapped ? u.x : u.y, kSwapped ? u.w : u.z,
                          kSwapped ? u.z : u.w};
      const float b[8] = {v.x, v.y, v.z, v.w, w.x, w.y, w.z, w.w};
      // There and back over i: neighbours share a[i] or b[j], which the reuse cache then holds.
      FA_UNROLL
      for (int n = 0; n < 32; ++n) {
        const int j = n / 4, i = j & 1 ? 3 - n % 4 : n % 4;
        sum[i][j] += a[i] * b[j];
      }
    }
  }
}

// Bits [0, rows - first) of 32: the rows there are.
FA_DEVICE unsigned rows_left(int rows, int first) {
  const int left = rows - first;
  return left >= 32 ? ~0u : left <= 0 ? 0u : (1u << left) - 1;
}

// sum[r][c] += A[a_first + r] . B[b_first + c] over all columns, whose number both share; the
// starts are columns_start of these rows.
template <class T>
FA_DEVICE void multiply_columns(Fragment& sum, const Rows<const T>& a, const T* a_start,
                                int a_first, const Rows<const T>& b, const T* b_start, int b_first,
                                char* shared, const Lane& lane) {
  const int a_whole = a.whole_columns(a_first), b_whole = b.whole_columns(b_first);
  FA_UNROLL_N(1)
  for (int column = 0; column < a.columns; column += kPiece) {
    ColumnPiece<T> a_piece, b_piece;
    a_piece.load(a, a_start, a_first, column, a_whole, lane);
    b_piece.load(b, b_start, b_first, column, b_whole, lane);
    __syncthreads();
    a_piece.store(shared, lane);
    b_piece.store(shared + kPieceBytes, lane);
    __syncthreads();
    multiply<false>(sum, shared, 0, kPieceBytes, lane);
  }
}

// The same with A already in pieces from `a_piece` on, one for every 32 columns.
template <class T>
FA_DEVICE void multiply_columns(Fragment& sum, unsigned a_piece, const Rows<const T>& b,
                                const T* b_start, int b_first, char* shared, const Lane& lane) {
  const int whole = b.whole_columns(b_first);
  FA_UNROLL_N(1)
  for (int column = 0; column < b.columns; column += kPiece) {
    ColumnPiece<T> piece;
    piece.load(b, b_start, b_first, column, whole, lane);
    __syncthreads();
    piece.store(shared, lane);
    __syncthreads();
    multiply<false>(sum, shared, a_piece + column * kRowBytes, 0, lane);
  }
}

// sum[n][r][c] += x[r][k] * B[k][column + 64 * n + c] over the 64 k of a tile, whose rows_start is
// given; `visible`: which rows of B count.
template <int kColumns, class T>
FA_DEVICE void multiply_rows(Fragment (&sum)[kColumns / kTile], const Fragment& x,
                             const Rows<const T>& b, const T* start, int column,
                             const unsigned (&visible)[2], char* shared, const Lane& lane) {
  FA_UNROLL
  for (int half = 0; half < 2; ++half) {
    FA_UNROLL
    for (int n = 0; n < kColumns / kTile; ++n) {
      RowPiece<T> piece;
      piece.load(b, start + n * kTile * static_cast<int64_t>(b.column_stride), column + kTile * n,
                 visible[half], lane);
      __syncthreads();
      if (n == 0) half ? store_fragment<1>(shared, x, lane) : store_fragment<0>(shared, x, lane);
      piece.store(shared + kPieceBytes, lane);
      __syncthreads();
      multiply<true>(sum[n], shared, 0, kPieceBytes, lane);
    }
    start += kPiece * static_cast<int64_t>(b.row_stride);
  }
}

// x[i][j] * factor[i] to rows [first, first + 64), columns [column, column + 64), where there are.
template <class T>
FA_DEVICE void write_tile(const Rows<T>& to, const Fragment& x, const float (&factor)[4], int first,
                          int column, const Lane& lane) {
  FA_UNROLL
  for (int i = 0; i < 4; ++i) {
    const int row = first + lane.row(i);
    if (row >= to.rows) continue;
    FA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int c = column + lane.column(4 * half);
      T* at = to.at(row, c);
      const float f = factor[i], *q = &x[i][4 * half];
      if (to.aligned && c + 4 <= to.columns) {
        const float scaled[4] = {q[0] * f, q[1] * f, q[2] * f, q[3] * f};
        store_global(at, pack<T, 4>(scaled));
      } else {
        FA_UNROLL
        for (int j = 0; j < 4; ++j)
          if (c + j < to.columns)
            at[j * static_cast<int64_t>(to.column_stride)] = from_float<T>(q[j] * f);
      }
    }
  }
}

}  // namespace fa
