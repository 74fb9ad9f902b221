// SPDX-License-Identifier: BSD-3-Clause
#include "core/half.h"

#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace executorch_qnn {
namespace {

constexpr float kLargest = 65504.0f;

uint32_t bits_of(float value) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

float float_of(uint32_t bits) {
  float value = 0;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Both are written as selects and not as branches, so that compilers turn loops of them into
// vectors.
uint16_t half_of(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t sign = (bits >> 16) & 0x8000;
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  // Normal: rebias the exponent, round the 13 bits that go away to nearest even.
  const uint32_t odd = (magnitude >> 13) & 1;
  uint32_t half = (magnitude - 0x38000000u + 0xFFF + odd) >> 13;
  // Subnormal: adding 0.5 moves the value to where a float's last bit is 2^-24, and rounds it.
  const uint32_t small = bits_of(float_of(magnitude) + 0.5f) - 0x3F000000u;
  half = magnitude < 0x38800000u ? small : half;
  half = magnitude >= 0x477FF000u ? 0x7BFFu : half;
  half = magnitude == 0x7F800000u ? 0x7C00u : half;
  half = magnitude > 0x7F800000u ? 0x7E00u | ((magnitude >> 13) & 0x1FF) : half;
  return static_cast<uint16_t>(sign | half);
}

float float_of_half(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t magnitude = half & 0x7FFF;
  uint32_t bits = (magnitude << 13) + 0x38000000u;
  // Subnormal: m * 2^-24, as (1 + m * 2^-10) * 2^-14 - 2^-14; no float on the way is subnormal.
  const uint32_t small = bits_of(float_of(0x38800000u | (magnitude << 13)) - 0x1p-14f);
  bits = magnitude < 0x400 ? small : bits;
  bits = magnitude >= 0x7C00 ? 0x7F800000u | (magnitude << 13) : bits;
  bits = magnitude > 0x7C00 ? bits | 0x400000u : bits;  // quiet
  return float_of(sign | bits);
}

// The nearest float whose rounding to fp16 equals that of `value`: rounded to odd, so that the
// second rounding still sees that something was cut off.
float to_float_odd(double value) {
  const auto nearest = static_cast<float>(value);
  const double error = value - static_cast<double>(nearest);
  // Exact, infinite, NaN, or so small that it is zero in fp16, too.
  if (error == 0 || nearest - nearest != 0 || nearest == 0) return nearest;
  uint32_t bits = bits_of(nearest);
  const bool away = (error < 0) == (nearest > 0);  // |nearest| > |value|
  if ((bits & 1) == 0) bits += away ? -1 : 1;
  return float_of(bits);
}

#if defined(__x86_64__)

__attribute__((target("avx,f16c"))) size_t to_half_vector(const float* from, uint16_t* to,
                                                          size_t count) noexcept {
  const __m256 high = _mm256_set1_ps(kLargest);
  const __m256 low = _mm256_set1_ps(-kLargest);
  const __m256 infinity = _mm256_set1_ps(float_of(0x7F800000u));
  const __m256 no_sign = _mm256_set1_ps(float_of(0x7FFFFFFFu));
  size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m256 x = _mm256_loadu_ps(from + i);
    // With a NaN these two return their second operand.
    const __m256 clamped = _mm256_min_ps(high, _mm256_max_ps(low, x));
    const __m256 infinite = _mm256_cmp_ps(_mm256_and_ps(x, no_sign), infinity, _CMP_EQ_OQ);
    const __m256 value = _mm256_blendv_ps(clamped, x, infinite);
    const __m128i half = _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), half);
  }
  return i;
}

__attribute__((target("avx,f16c"))) size_t from_half_vector(const uint16_t* from, float* to,
                                                            size_t count) noexcept {
  size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(half));
  }
  return i;
}

// AVX needs the operating system's consent as well, which __builtin_cpu_supports asks for.
bool detect_vectors() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx")) return false;
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && ((ecx >> 29) & 1) != 0;
}

bool has_vectors() {
  static const bool has = detect_vectors();
  return has;
}

#elif defined(__aarch64__)

size_t to_half_vector(const float* from, uint16_t* to, size_t count) noexcept {
  const float32x4_t high = vdupq_n_f32(kLargest);
  const float32x4_t infinity = vdupq_n_f32(float_of(0x7F800000u));
  size_t i = 0;
  for (; i + 4 <= count; i += 4) {
    const float32x4_t x = vld1q_f32(from + i);
    const float32x4_t clamped = vminq_f32(high, vmaxq_f32(vnegq_f32(high), x));  // NaN stays NaN
    const float32x4_t value = vbslq_f32(vceqq_f32(vabsq_f32(x), infinity), x, clamped);
    vst1_u16(to + i, vreinterpret_u16_f16(vcvt_f16_f32(value)));
  }
  return i;
}

size_t from_half_vector(const uint16_t* from, float* to, size_t count) noexcept {
  size_t i = 0;
  for (; i + 4 <= count; i += 4) {
    vst1q_f32(to + i, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from + i))));
  }
  return i;
}

constexpr bool has_vectors() { return true; }

#else

size_t to_half_vector(const float*, uint16_t*, size_t) noexcept { return 0; }
size_t from_half_vector(const uint16_t*, float*, size_t) noexcept { return 0; }
constexpr bool has_vectors() { return false; }

#endif

}  // namespace

void internal::to_half_portable(const float* from, uint16_t* to, size_t count) noexcept {
  for (size_t i = 0; i < count; ++i) to[i] = half_of(from[i]);
}

void internal::from_half_portable(const uint16_t* from, float* to, size_t count) noexcept {
  for (size_t i = 0; i < count; ++i) to[i] = float_of_half(from[i]);
}

void to_half(const float* from, uint16_t* to, size_t count) noexcept {
  const size_t done = has_vectors() ? to_half_vector(from, to, count) : 0;
  internal::to_half_portable(from + done, to + done, count - done);
}

void from_half(const uint16_t* from, float* to, size_t count) noexcept {
  const size_t done = has_vectors() ? from_half_vector(from, to, count) : 0;
  internal::from_half_portable(from + done, to + done, count - done);
}

void to_half(const double* from, uint16_t* to, size_t count) noexcept {
  for (size_t i = 0; i < count; ++i) {
    // A double that is finite must not become infinite on its way through float.
    const bool beyond = (from[i] > kLargest || from[i] < -kLargest) && from[i] - from[i] == 0;
    to[i] = beyond ? half_of(from[i] > 0 ? kLargest : -kLargest) : half_of(to_float_odd(from[i]));
  }
}

void from_half(const uint16_t* from, double* to, size_t count) noexcept {
  for (size_t i = 0; i < count; ++i) to[i] = static_cast<double>(float_of_half(from[i]));
}

}  // namespace executorch_qnn
