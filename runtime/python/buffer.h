// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>

namespace executorch_qnn {

// Borrows the memory of a Python object with the buffer protocol (bytes, memoryview, numpy array,
// mmap), which must be C-contiguous; raises BufferError or TypeError otherwise.
class Buffer {
 public:
  explicit Buffer(nanobind::handle object, int flags = PyBUF_SIMPLE) {
    if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) throw nanobind::python_error();
  }
  ~Buffer() {
    if (view_.obj != nullptr) PyBuffer_Release(&view_);
  }
  Buffer(Buffer&& other) noexcept : view_(other.view_) { other.view_.obj = nullptr; }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  // Never null, also for an empty buffer.
  const void* data() const { return view_.buf; }
  void* mutable_data() const { return view_.buf; }
  size_t size() const { return static_cast<size_t>(view_.len); }

 private:
  Py_buffer view_{};
};

}  // namespace executorch_qnn
