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
  kUint16 = 27,
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

// How integers stand for real numbers, if they do: real = (q + offset) * scale.
struct TensorEncoding {
  bool quantized = false;
  float scale = 0;
  int32_t offset = 0;

  bool operator==(const TensorEncoding& other) const {
    return quantized == other.quantized &&
           (!quantized || (scale == other.scale && offset == other.offset));
  }
  // Whether it is none, or one that can be computed with: the scale is a normal number > 0, the
  // offset at most kMaxOffset of core/quantize.h either way.
  ETQNN_API bool valid() const;
};

enum class Conversion : uint8_t {
  kNone,         // same bytes
  kFloat32Half,  // see core/half.h
  kFloat64Half,
  kFloat64Float32,
  kInt64Int32,
  kQuantized,  // see core/quantize.h
};

// How host values become NPU values and back. The two buffers do not overlap; nothing allocates.
struct ETQNN_API Converter {
  Conversion kind = Conversion::kNone;
  ScalarType host{};
  abi::DataType npu{};
  TensorEncoding encoding;  // if the kind is kQuantized

  // Converts `count` elements. False if an int64 does not fit into 32 bits; what was written is
  // then undefined. With kQuantized, float64 is rounded to float32 first.
  bool to_npu(const void* from, void* to, size_t count) const noexcept;
  // With kQuantized, the float32 that results is rounded to a host's float16; a value beyond
  // +-65504 becomes that.
  void to_host(const void* from, void* to, size_t count) const noexcept;
};

// Whether the host's real numbers are integers on the NPU, which takes an encoding.
ETQNN_API bool is_quantized(ScalarType host, abi::DataType npu);
// Nothing if the two types do not go together, or only with a valid encoding.
ETQNN_API std::optional<Converter> converter(ScalarType host, abi::DataType npu,
                                             const TensorEncoding& encoding = {});

}  // namespace executorch_qnn
