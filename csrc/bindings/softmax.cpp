#include "softmax/softmax.h"

#include "bindings/module.h"

namespace fastattn {

void bind_softmax(pybind11::module_& m) {
  m.def("softmax_forward", [](TensorView x, TensorView mask, TensorView out, bool is_causal,
                              double scale, int threads) {
    const pybind11::gil_scoped_release unlocked;
    softmax_kernels().forward({x, mask, out, is_causal, scale, threads});
  });
  m.def("softmax_backward",
        [](TensorView grad_out, TensorView out, TensorView grad_x, double scale, int threads) {
          const pybind11::gil_scoped_release unlocked;
          softmax_kernels().backward({grad_out, out, grad_x, scale, threads});
        });
}

}  // namespace fastattn
