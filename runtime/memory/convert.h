// SPDX-License-Identifier: BSD-3-Clause
// Element types on both sides of the NPU's boundary, and what is done to values that cross it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/api.h"
#include "qnn/abi.h"

namespace executorch_qnn {

// The host's element types; the numbers are those of c10::ScalarType.
enum class ScalarType : int8_t {
  kUint8 = 0,
  kInt8 = 1,
  kInt16 = 2,
  kInt32 = 3,
  kInt64 = 4,
  kFloat16 = 5,
  kFloat32 = 6,
  kFloat64 = 7,
  kBool = 11,
};

// Null for a number that is none of the above.
ETQNN_API const char* to_string(ScalarType type);
// Bytes per element; 0 for a number that is none of the above.
ETQNN_API size_t element_bytes(ScalarType type);
// The same for QNN's types.
ETQNN_API size_t element_bytes(abi::DataType type);
ETQNN_API const char* to_string(abi::DataType type);

// "float32[1, 4]"
ETQNN_API std::string describe(const char* type, const uint32_t* dims, size_t rank);
ETQNN_API std::string describe(ScalarType type, const std::vector<uint32_t>& dims);

// Number of elements, or nothing if a dimension is zero or a buffer of 8-byte elements of that
// shape would not fit QNN's 32-bit sizes.
ETQNN_API std::optional<size_t> element_count(const std::vector<uint32_t>& dims);

// How host values become NPU values and back.
enum class Conversion : uint8_t {
  kNone,         // same bytes
  kFloat32Half,  // see core/half.h
  kFloat64Half,
  kFloat64Float32,
  kInt64Int32,
};

// Nothing if the two types do not go together.
ETQNN_API std::optional<Conversion> conversion(ScalarType host, abi::DataType npu);

// Converts `count` elements. False if an int64 does not fit into 32 bits; what was written is then
// undefined. The two buffers do not overlap.
ETQNN_API bool to_npu(Conversion conversion, const void* host, void* npu, size_t count,
                      size_t npu_element_bytes) noexcept;
ETQNN_API void to_host(Conversion conversion, const void* npu, void* host, size_t count,
                       size_t npu_element_bytes) noexcept;

}  // namespace executorch_qnn
