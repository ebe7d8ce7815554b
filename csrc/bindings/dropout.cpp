#include "dropout/dropout.h"

#include "bindings/module.h"

namespace fastattn {

void bind_dropout(pybind11::module_& m) {
  m.def("dropout_forward",
        [](TensorView x, TensorView rng_state, double p, TensorView out, int threads) {
          const pybind11::gil_scoped_release unlocked;
          dropout_kernels().forward({x, out, read_dropout(rng_state, p), threads});
        });
}

}  // namespace fastattn
