// SPDX-License-Identifier: BSD-3-Clause
#include "memory/convert.h"

#include <cstring>

#include "core/half.h"

namespace executorch_qnn {

const char* to_string(ScalarType type) {
  switch (type) {
    case ScalarType::kUint8:
      return "uint8";
    case ScalarType::kInt8:
      return "int8";
    case ScalarType::kInt16:
      return "int16";
    case ScalarType::kInt32:
      return "int32";
    case ScalarType::kInt64:
      return "int64";
    case ScalarType::kFloat16:
      return "float16";
    case ScalarType::kFloat32:
      return "float32";
    case ScalarType::kFloat64:
      return "float64";
    case ScalarType::kBool:
      return "bool";
  }
  return nullptr;
}

size_t element_bytes(ScalarType type) {
  switch (type) {
    case ScalarType::kUint8:
    case ScalarType::kInt8:
    case ScalarType::kBool:
      return 1;
    case ScalarType::kInt16:
    case ScalarType::kFloat16:
      return 2;
    case ScalarType::kInt32:
    case ScalarType::kFloat32:
      return 4;
    case ScalarType::kInt64:
    case ScalarType::kFloat64:
      return 8;
  }
  return 0;
}

size_t element_bytes(abi::DataType type) {
  // The low byte of QNN's numbers is the width in bits, written in decimal digits.
  switch (static_cast<uint32_t>(type) & 0xFF) {
    case 0x08:
      return 1;
    case 0x16:
      return 2;
    case 0x32:
      return 4;
    case 0x64:
      return 8;
    default:
      return 0;
  }
}

const char* to_string(abi::DataType type) {
  static constexpr struct {
    uint32_t type;
    const char* name;
  } kNames[] = {{0x008, "INT8"},     {0x016, "INT16"},    {0x032, "INT32"},   {0x064, "INT64"},
                {0x108, "UINT8"},    {0x116, "UINT16"},   {0x132, "UINT32"},  {0x164, "UINT64"},
                {0x216, "FLOAT16"},  {0x232, "FLOAT32"},  {0x264, "FLOAT64"}, {0x308, "SFIXED8"},
                {0x316, "SFIXED16"}, {0x332, "SFIXED32"}, {0x408, "UFIXED8"}, {0x416, "UFIXED16"},
                {0x432, "UFIXED32"}, {0x508, "BOOL8"}};
  for (const auto& entry : kNames) {
    if (entry.type == static_cast<uint32_t>(type)) return entry.name;
  }
  return "an unknown type";
}

std::string describe(const char* type, const uint32_t* dims, size_t rank) {
  std::string text = type == nullptr ? "unknown" : type;
  text += '[';
  for (size_t i = 0; i < rank; ++i) text += (i > 0 ? ", " : "") + std::to_string(dims[i]);
  return text + ']';
}

std::string describe(ScalarType type, const std::vector<uint32_t>& dims) {
  return describe(to_string(type), dims.data(), dims.size());
}

std::optional<size_t> element_count(const std::vector<uint32_t>& dims) {
  uint64_t count = 1;
  for (uint32_t dim : dims) {
    count *= dim;  // at most 2^29 * 2^32
    if (count == 0 || count > UINT32_MAX / 8) return std::nullopt;
  }
  return static_cast<size_t>(count);
}

std::optional<Conversion> conversion(ScalarType host, abi::DataType npu) {
  using abi::DataType;
  switch (host) {
    case ScalarType::kFloat32:
      if (npu == DataType::kFloat16) return Conversion::kFloat32Half;
      if (npu == DataType::kFloat32) return Conversion::kNone;
      break;
    case ScalarType::kFloat64:
      if (npu == DataType::kFloat16) return Conversion::kFloat64Half;
      if (npu == DataType::kFloat32) return Conversion::kFloat64Float32;
      if (static_cast<uint32_t>(npu) == 0x264) return Conversion::kNone;
      break;
    case ScalarType::kFloat16:
      if (npu == DataType::kFloat16) return Conversion::kNone;
      break;
    case ScalarType::kInt64:
      if (npu == DataType::kInt32) return Conversion::kInt64Int32;
      if (npu == DataType::kInt64) return Conversion::kNone;
      break;
    case ScalarType::kInt32:
      if (npu == DataType::kInt32 || npu == DataType::kSFixed32) return Conversion::kNone;
      break;
    case ScalarType::kInt16:
      if (npu == DataType::kInt16 || npu == DataType::kSFixed16) return Conversion::kNone;
      break;
    case ScalarType::kInt8:
      if (npu == DataType::kInt8 || npu == DataType::kSFixed8) return Conversion::kNone;
      break;
    case ScalarType::kUint8:
      if (npu == DataType::kUint8 || npu == DataType::kUFixed8) return Conversion::kNone;
      break;
    case ScalarType::kBool:
      if (npu == DataType::kBool8) return Conversion::kNone;
      break;
  }
  return std::nullopt;
}

bool to_npu(Conversion conversion, const void* host, void* npu, size_t count,
            size_t npu_element_bytes) noexcept {
  switch (conversion) {
    case Conversion::kNone:
      std::memcpy(npu, host, count * npu_element_bytes);
      return true;
    case Conversion::kFloat32Half:
      to_half(static_cast<const float*>(host), static_cast<uint16_t*>(npu), count);
      return true;
    case Conversion::kFloat64Half:
      to_half(static_cast<const double*>(host), static_cast<uint16_t*>(npu), count);
      return true;
    case Conversion::kFloat64Float32: {
      const auto* from = static_cast<const double*>(host);
      auto* to = static_cast<float*>(npu);
      for (size_t i = 0; i < count; ++i) to[i] = static_cast<float>(from[i]);
      return true;
    }
    case Conversion::kInt64Int32: {
      const auto* from = static_cast<const int64_t*>(host);
      auto* to = static_cast<int32_t*>(npu);
      int64_t lost = 0;
      for (size_t i = 0; i < count; ++i) {
        to[i] = static_cast<int32_t>(from[i]);
        lost |= from[i] ^ to[i];  // not zero where the sign-extended value differs
      }
      return lost == 0;
    }
  }
  return false;
}

void to_host(Conversion conversion, const void* npu, void* host, size_t count,
             size_t npu_element_bytes) noexcept {
  switch (conversion) {
    case Conversion::kNone:
      std::memcpy(host, npu, count * npu_element_bytes);
      return;
    case Conversion::kFloat32Half:
      from_half(static_cast<const uint16_t*>(npu), static_cast<float*>(host), count);
      return;
    case Conversion::kFloat64Half:
      from_half(static_cast<const uint16_t*>(npu), static_cast<double*>(host), count);
      return;
    case Conversion::kFloat64Float32: {
      const auto* from = static_cast<const float*>(npu);
      auto* to = static_cast<double*>(host);
      for (size_t i = 0; i < count; ++i) to[i] = static_cast<double>(from[i]);
      return;
    }
    case Conversion::kInt64Int32: {
      const auto* from = static_cast<const int32_t*>(npu);
      auto* to = static_cast<int64_t*>(host);
      for (size_t i = 0; i < count; ++i) to[i] = from[i];
      return;
    }
  }
}

}  // namespace executorch_qnn
