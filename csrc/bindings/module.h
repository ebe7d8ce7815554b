// What csrc/bindings/<op>.cpp needs: it defines `void bind_<op>(module_&)`, which setup.py's
// FASTATTN_BINDINGS(X) lists and module.cpp calls.
#pragma once

#include <pybind11/pybind11.h>

#include "bindings/tensor_caster.h"
