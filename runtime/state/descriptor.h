// SPDX-License-Identifier: BSD-3-Clause
// What a mutable buffer is, independent of who uses it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/api.h"
#include "core/status.h"
#include "memory/convert.h"
#include "qnn/abi.h"

namespace executorch_qnn {

// The identity of a mutable buffer: its fully qualified name, and what must agree for two users of
// that name to mean the same memory.
struct ETQNN_API StateDescriptor {
  std::string name;
  ScalarType host_type = ScalarType::kFloat32;          // how the model declares it
  abi::DataType stored_type = abi::DataType::kFloat16;  // how it lies in memory
  std::vector<uint32_t> dims;
  TensorEncoding encoding;

  size_t elements() const;
  size_t stored_bytes() const { return elements() * element_bytes(stored_type); }
  size_t host_bytes() const { return elements() * element_bytes(host_type); }
  bool operator==(const StateDescriptor& other) const;
  // Between values of the host's type and stored ones; nothing if they cannot be stored so.
  std::optional<Converter> converter() const;
  // kState unless `size` is host_bytes().
  Status check_host_bytes(size_t size) const;
  // "cache: float32[1, 4] stored as FLOAT16"
  std::string describe() const;
};

}  // namespace executorch_qnn
