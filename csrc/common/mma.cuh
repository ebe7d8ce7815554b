// Tensor cores (sm_75 and up) and asynchronous copies (sm_80 and up), each in a small wrapper with
// a twin for emulated threads. Fragments are those of the PTX manual: lane = 4 * row + column pair.
#pragma once

#include "common/convert.cuh"

namespace fa {

template <class T>
constexpr bool kIsHalf = false;
template <>
constexpr bool kIsHalf<__half> = true;

#ifdef FASTATTN_EMULATOR
namespace twin {

template <class T>
inline float half_of(uint32_t pair, int which) {
  const auto bits = static_cast<uint16_t>(pair >> (16 * which));
  T x;
  memcpy(static_cast<void*>(&x), &bits, sizeof x);
  return to_float(x);
}

template <int kA, int kB>
struct Fragments {
  uint32_t a[kA], b[kB];
};

// c += a b for a [16, 8 * kB] and b [8 * kB, 8], row and column major; a products' sum is fp32.
template <class T, int kB>
inline void mma(const char* name, float (&c)[4], const uint32_t (&a)[2 * kB],
                const uint32_t (&b)[kB], emulator::Site at) {
  Fragments<2 * kB, kB> mine;
  memcpy(mine.a, a, sizeof a);
  memcpy(mine.b, b, sizeof b);
  const int lane = emulator::lane();
  emulator::collective(name, 0xffffffffu, mine, at, [&](const Fragments<2 * kB, kB>* all) {
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
      for (int k = 0; k < 8 * kB; ++k) {
        const auto& left = all[row % 8 * 4 + k % 8 / 2];
        const auto& right = all[column * 4 + k % 8 / 2];
        c[i] += half_of<T>(left.a[row / 8 + k / 8 * 2], k % 2) * half_of<T>(right.b[k / 8], k % 2);
      }
    }
    return 0;
  });
}

template <int N>
inline void ldmatrix(const char* name, uint32_t (&out)[N], const void* row, bool transposed,
                     emulator::Site at) {
  const int lane = emulator::lane();
  if (lane < 8 * N) emulator::touch_shared(emulator::Access::load, row, 16, nullptr, at);
  emulator::collective(name, 0xffffffffu, row, at, [&](const void* const* rows) {
    for (int matrix = 0; matrix < N; ++matrix) {
      for (int half = 0; half < 2; ++half) {
        const int r = transposed ? lane % 4 * 2 + half : lane / 4;
        const int c = transposed ? lane / 4 : lane % 4 * 2 + half;
        const auto* elements = static_cast<const uint16_t*>(rows[8 * matrix + r]);
        const uint32_t bits = elements[c];
        out[matrix] = half ? out[matrix] | bits << 16 : bits;
      }
    }
    return 0;
  });
}

}  // namespace twin
#endif

// c += a b: a [16, 8] fp16, b [8, 8] fp16, c fp32. sm_75.
FA_DEVICE void mma_m16n8k8(float (&c)[4], const uint32_t (&a)[2], const uint32_t (&b)[1] FA_SITE) {
#ifdef FASTATTN_EMULATOR
  if (FA_ARCH < 750) emulator::fail("mma.m16n8k8 needs sm_75", at);
  twin::mma<__half>("mma.m16n8k8", c, a, b, at);
#elif FA_ARCH >= 750
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(b[0]));
#else
  __trap();
#endif
}

// c += a b: a [16, 16], b [16, 8] of T = __half or __nv_bfloat16, c fp32. sm_80.
template <class T>
FA_DEVICE void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2] FA_SITE) {
#ifdef FASTATTN_EMULATOR
  if (FA_ARCH < 800) emulator::fail("mma.m16n8k16 needs sm_80", at);
  twin::mma<T>("mma.m16n8k16", c, a, b, at);
#elif FA_ARCH >= 800
  if constexpr (kIsHalf<T>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
#else
  __trap();
#endif
}

// N = 1, 2 or 4 8 x 8 matrices of 16-bit elements; lanes 8 i .. 8 i + 7 point at the rows (16 bytes
// each) of matrix i. Lane l gets elements 2 (l % 4), 2 (l % 4) + 1 of row l / 4 or, transposed, of
// column l / 4. sm_75.
template <bool kTransposed, int N>
FA_DEVICE void ldmatrix(uint32_t (&out)[N], const void* row FA_SITE) {
  static_assert(N == 1 || N == 2 || N == 4, "1, 2 or 4 matrices");
#ifdef FASTATTN_EMULATOR
  if (FA_ARCH < 750) emulator::fail("ldmatrix needs sm_75", at);
  twin::ldmatrix(kTransposed ? "ldmatrix.trans" : "ldmatrix", out, row, kTransposed, at);
#elif FA_ARCH >= 750
#define FA_LDMATRIX_(shape, registers, ...)                                             \
  if constexpr (kTransposed)                                                            \
    asm volatile("ldmatrix.sync.aligned.m8n8." shape ".trans.shared.b16 " registers ";" \
                 : __VA_ARGS__                                                          \
                 : "r"(address)                                                         \
                 : "memory");                                                           \
  else                                                                                  \
    asm volatile("ldmatrix.sync.aligned.m8n8." shape ".shared.b16 " registers ";"       \
                 : __VA_ARGS__                                                          \
                 : "r"(address)                                                         \
                 : "memory")
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  if constexpr (N == 1) {
    FA_LDMATRIX_("x1", "{%0}, [%1]", "=r"(out[0]));
  } else if constexpr (N == 2) {
    FA_LDMATRIX_("x2", "{%0,%1}, [%2]", "=r"(out[0]), "=r"(out[1]));
  } else {
    FA_LDMATRIX_("x4", "{%0,%1,%2,%3}, [%4]", "=r"(out[0]), "=r"(out[1]), "=r"(out[2]),
                 "=r"(out[3]));
  }
#undef FA_LDMATRIX_
#else
  __trap();
#endif
}

// 16 bytes from global to shared memory, there after the wait; zeros where `valid` is false. sm_80.
FA_DEVICE void copy_async(void* to, const void* from, bool valid FA_SITE) {
#ifdef FASTATTN_EMULATOR
  if (FA_ARCH < 800) emulator::fail("cp.async needs sm_80", at);
  emulator::copy_async(to, valid ? from : nullptr, at);
#elif FA_ARCH >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(to))),
               "l"(from), "r"(valid ? 16 : 0)
               : "memory");
#else
  __trap();
#endif
}

// Closes a group of copies; wait_for_copies<n> waits until at most n groups are still under way.
FA_DEVICE void commit_copies() {
#ifdef FASTATTN_EMULATOR
  emulator::commit_copies();
#elif FA_ARCH >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

template <int kPending>
FA_DEVICE void wait_for_copies() {
#ifdef FASTATTN_EMULATOR
  emulator::wait_for_copies(kPending);
#elif FA_ARCH >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

}  // namespace fa
