#include "layer_norm/layer_norm.h"

#include "bindings/module.h"

namespace fastattn {

void bind_layer_norm(pybind11::module_& m) {
  m.def("layer_norm_forward",
        [](TensorView x, TensorView residual, TensorView weight, TensorView bias,
           TensorView rng_state, double p, double eps, TensorView out, TensorView sum,
           TensorView mean, TensorView rstd, int threads) {
          const pybind11::gil_scoped_release unlocked;
          layer_norm_kernels().forward({x, residual, weight, bias, out, sum, mean, rstd,
                                        read_dropout(rng_state, p), eps, threads});
        });
  m.def("layer_norm_backward",
        [](TensorView grad_out, TensorView grad_sum, TensorView sum, TensorView weight,
           TensorView mean, TensorView rstd, TensorView rng_state, double p, TensorView grad_x,
           TensorView grad_residual, TensorView partial, TensorView grad_weight,
           TensorView grad_bias, int threads) {
          const pybind11::gil_scoped_release unlocked;
          layer_norm_kernels().backward({grad_out, grad_sum, sum, weight, mean, rstd, grad_x,
                                         grad_residual, partial, grad_weight, grad_bias,
                                         read_dropout(rng_state, p), threads});
        });
}

}  // namespace fastattn
