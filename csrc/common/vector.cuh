// Rows in global memory, N consecutive elements of T at a time, as fp32 in registers.
//
// A thread's N elements are one access of N * sizeof(T) bytes (16 at most) where the address allows
// it and all of them are inside the row; otherwise they are read or written one by one. N *
// sizeof(T) is 2, 4, 8 or 16, or a multiple of 16, which takes several accesses.
#pragma once

#include "common/convert.cuh"

namespace fa {

// CUDA's type of so many bytes.
template <int kBytes>
struct Word;
template <>
struct Word<2> {
  using type = uint16_t;
};
template <>
struct Word<4> {
  using type = uint32_t;
};
template <>
struct Word<8> {
  using type = uint2;
};
template <>
struct Word<16> {
  using type = uint4;
};

template <class T, int N>
constexpr int access_bytes() {
  return N * static_cast<int>(sizeof(T)) < 16 ? N * static_cast<int>(sizeof(T)) : 16;
}

// The most elements of T that one access carries.
template <class T>
constexpr int kVector = 16 / static_cast<int>(sizeof(T));

// Elements from a vector access, widened.
template <class T, int N>
FA_DEVICE void unpack(const typename Word<N * sizeof(T)>::type& word, float* out) {
  T elements[N];
  memcpy(static_cast<void*>(elements), &word, sizeof word);
  FA_UNROLL
  for (int i = 0; i < N; ++i) out[i] = to_float(elements[i]);
}

template <class T, int N>
FA_DEVICE typename Word<N * sizeof(T)>::type pack(const float* x) {
  T elements[N];
  FA_UNROLL
  for (int i = 0; i < N; ++i) elements[i] = from_float<T>(x[i]);
  typename Word<N * sizeof(T)>::type word;
  memcpy(&word, elements, sizeof word);
  return word;
}

template <int kBytes, class T>
FA_DEVICE bool is_aligned(const T* p) {
  return reinterpret_cast<uintptr_t>(p) % kBytes == 0;
}

// out[i] = p[i] for i < valid, else 0. valid may be more than N, or negative.
template <int N, class T>
FA_DEVICE void load_row(float (&out)[N], const T* p, int64_t valid FA_SITE) {
  constexpr int kBytes = access_bytes<T, N>(), kEach = kBytes / static_cast<int>(sizeof(T));
  using Access = typename Word<kBytes>::type;
  if (valid >= N && is_aligned<kBytes>(p)) {
    FA_UNROLL
    for (int i = 0; i < N; i += kEach)
      unpack<T, kEach>(load_global<Access>(p + i FA_FROM_SITE), out + i);
  } else {
    FA_UNROLL
    for (int i = 0; i < N; ++i) out[i] = i < valid ? to_float(p[i]) : 0.0f;
  }
}

// p[i] = x[i], rounded once, for i < valid.
template <int N, class T>
FA_DEVICE void store_row(T* p, const float (&x)[N], int64_t valid FA_SITE) {
  constexpr int kBytes = access_bytes<T, N>(), kEach = kBytes / static_cast<int>(sizeof(T));
  if (valid >= N && is_aligned<kBytes>(p)) {
    FA_UNROLL
    for (int i = 0; i < N; i += kEach) store_global(p + i, pack<T, kEach>(x + i) FA_FROM_SITE);
  } else {
    FA_UNROLL
    for (int i = 0; i < N; ++i)
      if (i < valid) p[i] = from_float<T>(x[i]);
  }
}

}  // namespace fa
