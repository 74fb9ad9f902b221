// SPDX-License-Identifier: BSD-3-Clause
// The Python module `executorch_qnn._native`.
#include <nanobind/nanobind.h>

#include "python/error.h"

namespace nb = nanobind;

namespace executorch_qnn {
namespace {

PyObject* g_error_type = nullptr;

void set_python_error(const Status& status) {
  // No nanobind exceptions here: this runs while one is being translated.
  PyObject* message = PyUnicode_DecodeUTF8(
      status.message().data(), static_cast<Py_ssize_t>(status.message().size()), "replace");
  PyObject* error =
      message != nullptr ? PyObject_CallFunctionObjArgs(g_error_type, message, nullptr) : nullptr;
  Py_XDECREF(message);
  if (error == nullptr) return;  // Python has set an error of its own
  PyObject* code = PyLong_FromUnsignedLongLong(status.code());
  PyObject* kind = PyUnicode_FromString(to_string(status.kind()));
  if (code != nullptr && kind != nullptr && PyObject_SetAttrString(error, "code", code) == 0 &&
      PyObject_SetAttrString(error, "kind", kind) == 0) {
    PyErr_SetObject(g_error_type, error);
  }
  Py_XDECREF(code);
  Py_XDECREF(kind);
  Py_DECREF(error);
}

}  // namespace

void bind_error(nb::module_& module) {
  g_error_type = PyErr_NewException("executorch_qnn._native.Error", PyExc_RuntimeError, nullptr);
  module.attr("Error") = nb::handle(g_error_type);
  nb::register_exception_translator([](const std::exception_ptr& exception, void*) {
    try {
      std::rethrow_exception(exception);
    } catch (const NativeError& error) {
      set_python_error(error.status);
    }
  });
}

}  // namespace executorch_qnn

NB_MODULE(_native, module) {
  module.doc() =
      "The native half of executorch_qnn: QNN's libraries, graphs, contexts and sessions.";
  executorch_qnn::bind_error(module);
  executorch_qnn::bind_compile(module);
#ifdef ETQNN_WITH_SESSION
  executorch_qnn::bind_session(module);
#endif
}
