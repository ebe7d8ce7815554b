#include "driver/driver.h"

#include <pybind11/stl.h>

#include "bindings/module.h"

namespace fastattn {

void bind_driver(pybind11::module_& m) {
  namespace py = pybind11;
  m.def("driver_why_not", driver::why_not);
  m.def("driver_version", driver::version);
  m.def("driver_device_count", driver::device_count);
  m.def("driver_capability", driver::capability);
  m.def("driver_is_capturing", driver::is_capturing);
  m.def("driver_load",
        [](const py::bytes& cubin, const std::string& function, const std::string& display_name) {
          return driver::load(cubin, function, display_name);
        });
  m.def("driver_launch", [](int kernel, int device, std::tuple<unsigned, unsigned, unsigned> grid,
                            unsigned threads, unsigned shared, uint64_t stream,
                            const py::bytes& params) {
    const auto [x, y, z] = grid;
    driver::launch(kernel, device, {{x, y, z}, threads, shared, stream, std::string_view(params)});
  });
}

}  // namespace fastattn
