// SPDX-License-Identifier: BSD-3-Clause
// Loops that compilers turn into vectors; GCC only if it need not care for floating-point
// exceptions, see CMakeLists.txt.
#include "core/quantize.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace executorch_qnn {
namespace {

uint32_t bits_of(float value) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// From 2^23 to 2^24 a float's last bit is 1: adding the middle of it rounds a number of up to 22
// bits to nearest even, and leaves the integer in the low bits of the sum.
constexpr float kRound = 0x1.8p23f;
constexpr int32_t kRoundBits = 0x4B400000;

}  // namespace

template <class Integer>
void quantize(const float* from, Integer* to, size_t count, float scale, int32_t offset) noexcept {
  // Clamping to integers first and rounding then is the same as the other way around.
  const auto low = static_cast<float>(std::numeric_limits<Integer>::min() + offset);
  const auto high = static_cast<float>(std::numeric_limits<Integer>::max() + offset);
  const auto inverse = static_cast<float>(1 / static_cast<double>(scale));
  const int32_t bias = -offset - kRoundBits;
  for (size_t i = 0; i < count; ++i) {
    const float x = from[i] * inverse;
    const bool nan = (bits_of(x) & 0x7FFFFFFF) > 0x7F800000;
    const float clamped = std::min(std::max(x, low), high);
    const int32_t q = static_cast<int32_t>(bits_of(clamped + kRound)) + bias;
    to[i] = static_cast<Integer>(nan ? 0 : q);
  }
}

template <class Integer>
void dequantize(const Integer* from, float* to, size_t count, float scale,
                int32_t offset) noexcept {
  const auto added = static_cast<float>(offset);
  for (size_t i = 0; i < count; ++i) to[i] = (static_cast<float>(from[i]) + added) * scale;
}

template void quantize(const float*, uint8_t*, size_t, float, int32_t) noexcept;
template void quantize(const float*, int8_t*, size_t, float, int32_t) noexcept;
template void quantize(const float*, uint16_t*, size_t, float, int32_t) noexcept;
template void quantize(const float*, int16_t*, size_t, float, int32_t) noexcept;
template void dequantize(const uint8_t*, float*, size_t, float, int32_t) noexcept;
template void dequantize(const int8_t*, float*, size_t, float, int32_t) noexcept;
template void dequantize(const uint16_t*, float*, size_t, float, int32_t) noexcept;
template void dequantize(const int16_t*, float*, size_t, float, int32_t) noexcept;

}  // namespace executorch_qnn
