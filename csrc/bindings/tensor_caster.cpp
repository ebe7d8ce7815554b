#include "bindings/tensor_caster.h"

namespace py = pybind11;

namespace fastattn {
namespace {

// The parts of DLPack's C ABI (github.com/dmlc/dlpack, version 1) that reading a tensor needs.
struct DLTensor {
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t type_code, type_bits;
  uint16_t type_lanes;
  int64_t *shape, *strides;
  uint64_t byte_offset;
};

struct DLExchangeApi {
  uint32_t version_major, version_minor;
  void* previous;
  void* managed_tensor_allocator;
  void* managed_tensor_from_py_object;
  void* managed_tensor_to_py_object;
  int (*dltensor_from_py_object)(void* py_object, DLTensor* out);
  void* current_work_stream;
};

const DLExchangeApi* g_api = nullptr;
PyObject* g_dtype_codes = nullptr;

DType dtype_of(uint8_t code, uint8_t bits) {
  enum { dl_int = 0, dl_float = 2, dl_bfloat = 4, dl_bool = 6 };
  switch (code << 8 | bits) {
    case dl_float << 8 | 32:
      return DType::float32;
    case dl_float << 8 | 64:
      return DType::float64;
    case dl_float << 8 | 16:
      return DType::float16;
    case dl_bfloat << 8 | 16:
      return DType::bfloat16;
    case dl_bool << 8 | 8:
      return DType::boolean;
    case dl_int << 8 | 32:
      return DType::int32;
    case dl_int << 8 | 64:
      return DType::int64;
    default:
      throw py::type_error("the kernels can't read a tensor of this dtype");
  }
}

void check_dims(int64_t ndim) {
  if (ndim > kMaxDims)
    throw py::value_error("the kernels read tensors of at most " + std::to_string(kMaxDims) +
                          " dimensions, got " + std::to_string(ndim));
}

TensorView view_by_table(py::handle tensor) {
  DLTensor t;
  if (g_api->dltensor_from_py_object(tensor.ptr(), &t) != 0) throw py::error_already_set();
  check_dims(t.ndim);
  TensorView view;
  view.data = static_cast<char*>(t.data) + t.byte_offset;
  view.dtype = dtype_of(t.type_code, t.type_bits);
  view.ndim = t.ndim;
  for (int d = 0; d < t.ndim; ++d) {
    view.size[d] = t.shape[d];
    view.stride[d] = t.strides[d];
  }
  return view;
}

TensorView view_by_attributes(py::handle tensor) {
  const py::object dtype = tensor.attr("dtype");
  PyObject* code = PyDict_GetItem(g_dtype_codes, dtype.ptr());
  if (code == nullptr) throw py::type_error("the kernels can't read a tensor of this dtype");
  const py::tuple size = tensor.attr("shape"), stride = tensor.attr("stride")();
  check_dims(static_cast<int64_t>(size.size()));
  TensorView view;
  view.data = PyLong_AsVoidPtr(py::object(tensor.attr("data_ptr")()).ptr());
  view.dtype = static_cast<DType>(PyLong_AsLong(code));
  view.ndim = static_cast<int>(size.size());
  for (int d = 0; d < view.ndim; ++d) {
    view.size[d] = PyLong_AsLongLong(PyTuple_GET_ITEM(size.ptr(), d));
    view.stride[d] = PyLong_AsLongLong(PyTuple_GET_ITEM(stride.ptr(), d));
  }
  return view;
}

}  // namespace

void learn_torch(py::dict dtype_codes, py::object exchange_api) {
  g_dtype_codes = dtype_codes.release().ptr();
  g_api = nullptr;
  if (exchange_api.is_none()) return;
  auto* api =
      static_cast<DLExchangeApi*>(PyCapsule_GetPointer(exchange_api.ptr(), "dlpack_exchange_api"));
  if (api == nullptr) throw py::error_already_set();
  if (api->version_major == 1 && api->dltensor_from_py_object != nullptr) g_api = api;
}

TensorView view_tensor(py::handle tensor) {
  return g_api != nullptr ? view_by_table(tensor) : view_by_attributes(tensor);
}

}  // namespace fastattn
