#include "common/isa.h"

#include <algorithm>
#include <stdexcept>

namespace fastattn {
namespace {

Isa g_active = Isa::generic;

std::string join(const std::vector<Isa>& isas) {
  std::string names;
  for (Isa isa : isas) names += (names.empty() ? "" : ", ") + std::string(isa_name(isa));
  return names;
}

}  // namespace

const char* isa_name(Isa isa) {
  constexpr const char* names[] = {"generic", "sse42", "avx2", "avx512", "avx512bf16"};
  return names[static_cast<int>(isa)];
}

std::vector<Isa> isas_built() {
#define FASTATTN_LIST_(level, ...) Isa::level,
  return {FASTATTN_BUILT_ISAS(FASTATTN_LIST_, )};
#undef FASTATTN_LIST_
}

bool isa_supported(Isa isa) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const auto avx2 = [] {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("f16c");
  };
  const auto avx512 = [&] {
    return avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  };
  switch (isa) {
    case Isa::generic:
      return true;
    case Isa::sse42:
      return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("popcnt");
    case Isa::avx2:
      return avx2();
    case Isa::avx512:
      return avx512();
    case Isa::avx512bf16:
      return avx512() && __builtin_cpu_supports("avx512bf16");
  }
#endif
  return isa == Isa::generic;
}

void select_isa(const std::string& name) {
  const std::vector<Isa> built = isas_built();
  std::vector<Isa> usable;
  std::copy_if(built.begin(), built.end(), std::back_inserter(usable), isa_supported);
  if (name.empty()) {
    if (usable.empty())
      throw std::invalid_argument("this CPU supports none of the instruction sets built: " +
                                  join(built));
    g_active = usable.back();
    return;
  }
  const auto named = [&](Isa isa) { return name == isa_name(isa); };
  const auto found = std::find_if(usable.begin(), usable.end(), named);
  if (found == usable.end()) {
    const bool is_built = std::any_of(built.begin(), built.end(), named);
    throw std::invalid_argument("FASTATTN_CPU_ISA='" + name + "' is not " +
                                (is_built ? "supported by this CPU" : "built") +
                                "; usable here: " + join(usable));
  }
  g_active = *found;
}

Isa active_isa() {
  return g_active;
}

}  // namespace fastattn
