#include "cross_entropy/cross_entropy.h"

#include "bindings/module.h"

namespace fastattn {

void bind_cross_entropy(pybind11::module_& m) {
  m.def("cross_entropy_run",
        [](TensorView hidden, TensorView weight, TensorView bias, TensorView class_weight,
           TensorView target, TensorView tokens, TensorView factor, double a, double b,
           double weight_sum, TensorView loss, TensorView nll, TensorView lse,
           TensorView grad_hidden, TensorView grad_weight, TensorView grad_bias, TensorView logits,
           TensorView packed, TensorView partial, TensorView moments, int threads) {
          const pybind11::gil_scoped_release unlocked;
          cross_entropy_kernels().run(
              {hidden,      weight,    bias,       class_weight, target,  tokens,  factor,
               a,           b,         weight_sum, loss,         nll,     lse,     grad_hidden,
               grad_weight, grad_bias, logits,     packed,       partial, moments, threads});
        });
}

}  // namespace fastattn
