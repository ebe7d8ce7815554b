// The one product all attention kernels are made of, C[64][64] += A[64][32] B[32][64], in fp32, and
// what is made of it: products over all columns of two operands, and over the rows of one. The
// operands' shared pieces are those of attention_tile.cuh. Per k a thread reads 3 quads (16 bytes)
// for 32 multiply-adds. Results are written by write_tile.
#pragma once

#include "attention/attention_tile.cuh"

namespace fa {

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
