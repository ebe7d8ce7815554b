// The Python module fastattn._C. fastattn/_native.py is its only importer.
#include "bindings/module.h"

#include <pybind11/stl.h>

#include "common/isa.h"
#include "common/parallel.h"

namespace fastattn {
namespace {

std::vector<std::string> built_names() {
  std::vector<std::string> names;
  for (Isa isa : isas_built()) names.emplace_back(isa_name(isa));
  return names;
}

}  // namespace

#define FASTATTN_DECLARE_BIND_(op) void bind_##op(pybind11::module_& m);
FASTATTN_BINDINGS(FASTATTN_DECLARE_BIND_)

PYBIND11_MODULE(_C, m) {
  m.def("learn_torch", learn_torch);
  m.def("connect_openmp", connect_openmp);
  m.def("max_threads", max_threads);
  m.def("isas_built", built_names);
  m.def("select_isa", select_isa);
  m.def("active_isa", [] { return isa_name(active_isa()); });
#define FASTATTN_CALL_BIND_(op) bind_##op(m);
  FASTATTN_BINDINGS(FASTATTN_CALL_BIND_)
}

}  // namespace fastattn
