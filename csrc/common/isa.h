// Instruction-set levels. A file `csrc/<op>/<op>_cpu.cpp` is compiled once per level with
// FASTATTN_ISA set to the level's name, and puts everything it defines into the namespace
// fastattn::FASTATTN_ISA, so that no inline function of one level can stand in for another's.
//
// FASTATTN_BUILT_ISAS(X, ...) is set by setup.py and lists the levels of this build, for instance
// X(avx2, __VA_ARGS__) X(avx512, __VA_ARGS__).
#pragma once

#include <string>
#include <vector>

namespace fastattn {

// In ascending order of preference.
enum class Isa { generic, sse42, avx2, avx512, avx512bf16 };

const char* isa_name(Isa isa);

// Levels compiled into this build, ascending.
std::vector<Isa> isas_built();

// True if this CPU and operating system can run the level.
bool isa_supported(Isa isa);

// Makes the named level the one that kernels run on; an empty name picks the best one.
// Throws std::invalid_argument with one sentence if it isn't known, built or supported.
void select_isa(const std::string& name);

// The level in use. Call select_isa first.
Isa active_isa();

}  // namespace fastattn

// For an op's header: FASTATTN_KERNEL_TABLE(SoftmaxKernels, softmax_kernels) declares one table per
// level, fastattn::<level>::softmax_kernels (defined by that level's object file, with `extern`),
// and fastattn::softmax_kernels(), which returns the active one.
#define FASTATTN_DECLARE_TABLE_(isa, Table, name) \
  namespace isa {                                 \
  extern const Table name;                        \
  }
#define FASTATTN_TABLE_CASE_(level, name) \
  case Isa::level:                        \
    return level::name;
#define FASTATTN_KERNEL_TABLE(Table, name)                  \
  FASTATTN_BUILT_ISAS(FASTATTN_DECLARE_TABLE_, Table, name) \
  inline const Table& name() {                              \
    switch (active_isa()) {                                 \
      FASTATTN_BUILT_ISAS(FASTATTN_TABLE_CASE_, name)       \
      default:                                              \
        __builtin_unreachable();                            \
    }                                                       \
  }
