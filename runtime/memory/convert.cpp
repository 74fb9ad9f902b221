// SPDX-License-Identifier: BSD-3-Clause
#include "memory/convert.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/half.h"
#include "core/quantize.h"

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
    case ScalarType::kUint16:
      return "uint16";
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
    case ScalarType::kUint16:
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

namespace {

std::optional<Conversion> conversion(ScalarType host, abi::DataType npu) {
  using abi::DataType;
  if (is_quantized(host, npu)) return Conversion::kQuantized;
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
    case ScalarType::kUint16:
      if (npu == DataType::kUint16 || npu == DataType::kUFixed16) return Conversion::kNone;
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

// Calls `visit` with a zero of the integer type that `type` stores real numbers in. False if it is
// none of those that are converted.
template <class Visit>
bool with_integer(abi::DataType type, const Visit& visit) {
  switch (type) {
    case abi::DataType::kUFixed8:
      visit(uint8_t{});
      return true;
    case abi::DataType::kSFixed8:
      visit(int8_t{});
      return true;
    case abi::DataType::kUFixed16:
      visit(uint16_t{});
      return true;
    case abi::DataType::kSFixed16:
      visit(int16_t{});
      return true;
    default:
      return false;
  }
}

void cast(const double* from, float* to, size_t count) {
  for (size_t i = 0; i < count; ++i) to[i] = static_cast<float>(from[i]);
}

void cast(const float* from, double* to, size_t count) {
  for (size_t i = 0; i < count; ++i) to[i] = static_cast<double>(from[i]);
}

// Floats on their way between another type of float and integers.
constexpr size_t kChunk = 256;

template <class Integer>
void quantize_from(const Converter& c, const void* from, Integer* to, size_t count) {
  const float scale = c.encoding.scale;
  const int32_t offset = c.encoding.offset;
  if (c.host == ScalarType::kFloat32) {
    return quantize(static_cast<const float*>(from), to, count, scale, offset);
  }
  float chunk[kChunk];
  for (size_t at = 0; at < count; at += kChunk) {
    const size_t n = std::min(kChunk, count - at);
    if (c.host == ScalarType::kFloat16) {
      from_half(static_cast<const uint16_t*>(from) + at, chunk, n);
    } else {
      cast(static_cast<const double*>(from) + at, chunk, n);
    }
    quantize(chunk, to + at, n, scale, offset);
  }
}

template <class Integer>
void dequantize_to(const Converter& c, const Integer* from, void* to, size_t count) {
  const float scale = c.encoding.scale;
  const int32_t offset = c.encoding.offset;
  if (c.host == ScalarType::kFloat32) {
    return dequantize(from, static_cast<float*>(to), count, scale, offset);
  }
  float chunk[kChunk];
  for (size_t at = 0; at < count; at += kChunk) {
    const size_t n = std::min(kChunk, count - at);
    dequantize(from + at, chunk, n, scale, offset);
    if (c.host == ScalarType::kFloat16) {
      to_half(chunk, static_cast<uint16_t*>(to) + at, n);
    } else {
      cast(chunk, static_cast<double*>(to) + at, n);
    }
  }
}

}  // namespace

bool TensorEncoding::valid() const {
  return !quantized ||
         (std::isnormal(scale) && scale > 0 && offset >= -kMaxOffset && offset <= kMaxOffset);
}

bool is_quantized(ScalarType host, abi::DataType npu) {
  const bool real =
      host == ScalarType::kFloat16 || host == ScalarType::kFloat32 || host == ScalarType::kFloat64;
  return real && with_integer(npu, [](auto) {});
}

std::optional<Converter> converter(ScalarType host, abi::DataType npu,
                                   const TensorEncoding& encoding) {
  const auto kind = conversion(host, npu);
  if (!kind) return std::nullopt;
  if (*kind == Conversion::kQuantized && !(encoding.quantized && encoding.valid())) {
    return std::nullopt;
  }
  return Converter{*kind, host, npu, encoding};
}

bool Converter::to_npu(const void* from, void* to, size_t count) const noexcept {
  switch (kind) {
    case Conversion::kNone:
      std::memcpy(to, from, count * element_bytes(npu));
      return true;
    case Conversion::kFloat32Half:
      to_half(static_cast<const float*>(from), static_cast<uint16_t*>(to), count);
      return true;
    case Conversion::kFloat64Half:
      to_half(static_cast<const double*>(from), static_cast<uint16_t*>(to), count);
      return true;
    case Conversion::kFloat64Float32:
      cast(static_cast<const double*>(from), static_cast<float*>(to), count);
      return true;
    case Conversion::kInt64Int32: {
      const auto* wide = static_cast<const int64_t*>(from);
      auto* narrow = static_cast<int32_t*>(to);
      int64_t lost = 0;
      for (size_t i = 0; i < count; ++i) {
        narrow[i] = static_cast<int32_t>(wide[i]);
        lost |= wide[i] ^ narrow[i];  // not zero where the sign-extended value differs
      }
      return lost == 0;
    }
    case Conversion::kQuantized:
      return with_integer(npu, [&](auto zero) {
        quantize_from(*this, from, static_cast<decltype(zero)*>(to), count);
      });
  }
  return false;
}

void Converter::to_host(const void* from, void* to, size_t count) const noexcept {
  switch (kind) {
    case Conversion::kNone:
      std::memcpy(to, from, count * element_bytes(npu));
      return;
    case Conversion::kFloat32Half:
      from_half(static_cast<const uint16_t*>(from), static_cast<float*>(to), count);
      return;
    case Conversion::kFloat64Half:
      from_half(static_cast<const uint16_t*>(from), static_cast<double*>(to), count);
      return;
    case Conversion::kFloat64Float32:
      cast(static_cast<const float*>(from), static_cast<double*>(to), count);
      return;
    case Conversion::kInt64Int32: {
      const auto* narrow = static_cast<const int32_t*>(from);
      auto* wide = static_cast<int64_t*>(to);
      for (size_t i = 0; i < count; ++i) wide[i] = narrow[i];
      return;
    }
    case Conversion::kQuantized:
      with_integer(npu, [&](auto zero) {
        dequantize_to(*this, static_cast<const decltype(zero)*>(from), to, count);
      });
      return;
  }
}

}  // namespace executorch_qnn
