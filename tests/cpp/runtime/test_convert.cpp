// SPDX-License-Identifier: BSD-3-Clause
// What is done to values that cross the NPU's boundary.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "check.h"
#include "core/half.h"
#include "core/quantize.h"
#include "memory/convert.h"

using namespace executorch_qnn;

// ------------------------------------------------------------------------------------- fp16

TEST(half_conversion_rounds_clamps_and_keeps_specials) {
  const float inf = std::numeric_limits<float>::infinity();
  // Enough of them that the vector code runs as well as the tail.
  const float from[] = {0.0f,    -0.0f,          1.0f,       65504.0f, 65519.9f, 65520.0f,
                        1e9f,    -1e9f,          inf,        -inf,     NAN,      6e-8f,
                        2.9e-8f, 2.98023224e-8f, 6.1035e-5f, 0.3333f,  2049.f,   2051.f};
  const uint16_t expected[] = {0x0000, 0x8000, 0x3C00, 0x7BFF, 0x7BFF, 0x7BFF,
                               0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0x0001,
                               0x0000, 0x0000, 0x0400, 0x3555, 0x6800, 0x6802};
  constexpr size_t kCount = sizeof expected / sizeof *expected;
  uint16_t fast[kCount], portable[kCount], wide[kCount];
  to_half(from, fast, kCount);
  internal::to_half_portable(from, portable, kCount);
  double doubles[kCount];
  for (size_t i = 0; i < kCount; ++i) doubles[i] = from[i];
  to_half(doubles, wide, kCount);
  for (size_t i = 0; i < kCount; ++i) {
    CHECK_EQ(fast[i], expected[i]);
    CHECK_EQ(portable[i], expected[i]);
    CHECK_EQ(wide[i], expected[i]);
  }
}

TEST(doubles_are_rounded_once) {
  // Just above the middle of 1 and 1 + 2^-10; rounding to float first would make a tie of it.
  const double from = 1.0 + 0x1p-11 + 0x1p-40;
  uint16_t half = 0;
  to_half(&from, &half, 1);
  CHECK_EQ(half, 0x3C01);
}

TEST(fast_and_portable_half_conversions_agree) {
  std::mt19937 random(3);
  std::vector<float> from(1 << 20);
  for (float& value : from) {
    const uint32_t bits = random();
    std::memcpy(&value, &bits, 4);
  }
  std::vector<uint16_t> fast(from.size()), portable(from.size());
  to_half(from.data(), fast.data(), from.size());
  internal::to_half_portable(from.data(), portable.data(), from.size());
  CHECK(fast == portable);
  std::vector<uint16_t> all(65536);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  std::vector<float> a(all.size()), b(all.size());
  from_half(all.data(), a.data(), all.size());
  internal::from_half_portable(all.data(), b.data(), all.size());
  CHECK(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
  for (size_t i = 0; i < all.size(); ++i) {
    if (std::isnan(a[i])) continue;
    uint16_t back = 0;
    to_half(&a[i], &back, 1);
    CHECK_EQ(back, all[i]);
  }
}

// ------------------------------------------------------------------------------------- integers

TEST(an_int64_beyond_32_bits_is_noticed) {
  const Converter converter = *executorch_qnn::converter(ScalarType::kInt64, abi::DataType::kInt32);
  int32_t to[3];
  const int64_t fine[] = {INT32_MIN, -1, INT32_MAX};
  CHECK(converter.to_npu(fine, to, 3));
  CHECK_EQ(to[0], INT32_MIN);
  for (int64_t bad : {int64_t{1} << 31, -(int64_t{1} << 31) - 1, INT64_MIN, int64_t{1} << 32}) {
    const int64_t values[] = {0, bad, 0};
    CHECK(!converter.to_npu(values, to, 3));
  }
}

TEST(integers_cross_as_they_are) {
  using abi::DataType;
  const struct {
    ScalarType host;
    DataType npu[2];
  } cases[] = {{ScalarType::kUint8, {DataType::kUint8, DataType::kUFixed8}},
               {ScalarType::kInt8, {DataType::kInt8, DataType::kSFixed8}},
               {ScalarType::kUint16, {DataType::kUint16, DataType::kUFixed16}},
               {ScalarType::kInt16, {DataType::kInt16, DataType::kSFixed16}},
               {ScalarType::kInt32, {DataType::kInt32, DataType::kSFixed32}}};
  for (const auto& c : cases) {
    for (const DataType npu : c.npu) {
      CHECK_EQ(element_bytes(c.host), element_bytes(npu));
      // An encoding says what the integers mean; they stay what they are.
      for (const TensorEncoding& encoding : {TensorEncoding{}, TensorEncoding{true, 0.5F, -7}}) {
        const auto found = converter(c.host, npu, encoding);
        CHECK(found && found->kind == Conversion::kNone);
        const uint8_t from[12] = {1, 2, 254, 255, 5, 6, 7, 128, 9, 10, 11, 12};
        uint8_t there[12] = {}, back[12] = {};
        CHECK(found->to_npu(from, there, 12 / element_bytes(npu)));
        found->to_host(there, back, 12 / element_bytes(npu));
        CHECK(std::memcmp(from, there, 12) == 0 && std::memcmp(from, back, 12) == 0);
      }
    }
  }
  CHECK(!converter(ScalarType::kUint16, DataType::kSFixed16));
  CHECK(!converter(ScalarType::kUint16, DataType::kInt16));
  CHECK(!converter(ScalarType::kInt16, DataType::kUFixed16));
  CHECK(!converter(ScalarType::kInt32, DataType::kUFixed16));
  CHECK(!converter(ScalarType::kBool, DataType::kUFixed8));
}

// ------------------------------------------------------------------------------------- quantized

namespace {

template <class Integer>
constexpr abi::DataType npu_type() {
  constexpr bool kSigned = std::numeric_limits<Integer>::is_signed;
  if (sizeof(Integer) == 1) return kSigned ? abi::DataType::kSFixed8 : abi::DataType::kUFixed8;
  return kSigned ? abi::DataType::kSFixed16 : abi::DataType::kUFixed16;
}

// Calls `check` with a zero of each type.
template <class Check>
void for_each_integer(const Check& check) {
  check(uint8_t{});
  check(int8_t{});
  check(uint16_t{});
  check(int16_t{});
}

// torch/ao/quantization/fx/_decomposed.py, step by step; NaN is what it gives on x86-64 and
// AArch64.
template <class Integer>
Integer quantize_per_tensor(float x, float scale, int32_t zero_point) {
  const auto inverse = static_cast<float>(1.0 / static_cast<double>(scale));
  const float product = x * inverse;
  if (std::isnan(product)) return 0;
  const float q = std::nearbyint(product) + static_cast<float>(zero_point);
  return static_cast<Integer>(std::clamp<float>(q, std::numeric_limits<Integer>::min(),
                                                std::numeric_limits<Integer>::max()));
}

template <class Integer>
float dequantize_per_tensor(Integer q, float scale, int32_t zero_point) {
  return (static_cast<float>(q) - static_cast<float>(zero_point)) * scale;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

constexpr float kScales[] = {0x1p-126F, 1e-30F, 1e-6F, 0.0123F, 0.1F,
                             1.0F / 3,  1.0F,   77.7F, 1e30F,   3.4e38F};

// The ends and the middle of the type's range, and as far out as can be computed with.
template <class Integer>
std::vector<int32_t> zero_points() {
  const int32_t low = std::numeric_limits<Integer>::min();
  const int32_t high = std::numeric_limits<Integer>::max();
  return {low,         low + 1,    (low + high) / 2, 0, high - 1, high,
          -kMaxOffset, kMaxOffset, 1 - kMaxOffset};
}

}  // namespace

TEST(quantizing_is_what_torch_does) {
  std::mt19937 random(6);
  for_each_integer([&](auto zero) {
    using Integer = decltype(zero);
    for (const float scale : kScales) {
      for (const int32_t zero_point : zero_points<Integer>()) {
        const TensorEncoding encoding{true, scale, -zero_point};
        const auto found = converter(ScalarType::kFloat32, npu_type<Integer>(), encoding);
        CHECK(found && found->kind == Conversion::kQuantized);
        // Any bits at all, values about the range, ties and their neighbours.
        std::vector<float> from(3000);
        for (size_t i = 0; i < from.size(); ++i) {
          const uint32_t bits = random();
          const auto steps = static_cast<float>(static_cast<int32_t>(bits % 200000) - 100000);
          const float about = (steps - static_cast<float>(zero_point)) * scale;
          const float tie = (steps / 8 + 0.5F) * scale;
          std::memcpy(&from[i], &bits, 4);
          if (i % 4 == 1) from[i] = about * (static_cast<float>(bits) * 0x1p-32F);
          if (i % 4 == 2) from[i] = tie;
          if (i % 4 == 3) from[i] = std::nextafter(tie, bits % 2 == 0 ? INFINITY : -INFINITY);
        }
        std::vector<Integer> to(from.size());
        CHECK(found->to_npu(from.data(), to.data(), from.size()));
        for (size_t i = 0; i < from.size(); ++i) {
          CHECK_EQ(to[i], quantize_per_tensor<Integer>(from[i], scale, zero_point));
        }
      }
    }
  });
}

TEST(ties_go_to_even_and_what_is_out_of_range_to_its_end) {
  const float from[] = {0.0F,     -0.0F,     0.25F, 0.75F, 1.25F,  1.75F,   -0.25F,  -0.75F,
                        63.5F,    63.75F,    64.0F, 1e9F,  -1e9F,  -63.5F,  -64.0F,  -64.25F,
                        INFINITY, -INFINITY, NAN,   -NAN,  1e-45F, 3.4e38F, -3.4e38F};
  constexpr size_t kCount = sizeof from / sizeof *from;
  const int8_t with_zero_point_1[kCount] = {1,   1,    1,   3,   3,    5,    1,    -1,
                                            127, 127,  127, 127, -128, -126, -127, -127,
                                            127, -128, 0,   0,   1,    127,  -128};
  int8_t to[kCount];
  CHECK(converter(ScalarType::kFloat32, abi::DataType::kSFixed8, {true, 0.5F, -1})
            ->to_npu(from, to, kCount));
  for (size_t i = 0; i < kCount; ++i) {
    CHECK_EQ(static_cast<int>(to[i]), static_cast<int>(with_zero_point_1[i]));
  }
}

TEST(every_integer_becomes_the_real_number_of_torch_and_comes_back) {
  for_each_integer([](auto zero) {
    using Integer = decltype(zero);
    std::vector<Integer> all(size_t{1} << 8 * sizeof(Integer));
    for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<Integer>(i);
    for (const float scale : kScales) {
      for (const int32_t zero_point : zero_points<Integer>()) {
        const TensorEncoding encoding{true, scale, -zero_point};
        const auto found = converter(ScalarType::kFloat32, npu_type<Integer>(), encoding);
        std::vector<float> reals(all.size()), expected(all.size());
        found->to_host(all.data(), reals.data(), all.size());
        bool finite = true;
        for (size_t i = 0; i < all.size(); ++i) {
          expected[i] = dequantize_per_tensor(all[i], scale, zero_point);
          finite = finite && std::isfinite(expected[i]);
        }
        CHECK(same_bits(reals, expected));
        std::vector<Integer> back(all.size());
        CHECK(found->to_npu(reals.data(), back.data(), all.size()));
        // Far from zero, or beyond a float, the reals no longer tell the integers apart.
        if (finite && std::abs(zero_point) <= 65535) CHECK(back == all);
      }
    }
  });
}

TEST(other_floats_are_converted_through_float32) {
  std::mt19937 random(7);
  for_each_integer([&](auto zero) {
    using Integer = decltype(zero);
    const TensorEncoding encoding{true, 0.037F, -100};
    const auto by_float = converter(ScalarType::kFloat32, npu_type<Integer>(), encoding);
    const auto by_double = converter(ScalarType::kFloat64, npu_type<Integer>(), encoding);
    const auto by_half = converter(ScalarType::kFloat16, npu_type<Integer>(), encoding);
    for (const size_t count : {0, 1, 2, 255, 256, 257, 511, 1025}) {
      std::vector<uint16_t> halves(count);
      std::vector<float> floats(count), doubles_as_floats(count);
      std::vector<double> doubles(count);
      for (size_t i = 0; i < count; ++i) {
        halves[i] = static_cast<uint16_t>(random());
        doubles[i] = std::ldexp(static_cast<double>(random()) - 0x1p31, -25 + i % 3);
        if (i % 50 == 7) doubles[i] = i % 100 == 7 ? 1e300 : -INFINITY;
        if (i % 50 == 9) doubles[i] = i % 100 == 9 ? NAN : 1e-300;
        doubles_as_floats[i] = static_cast<float>(doubles[i]);
      }
      from_half(halves.data(), floats.data(), count);
      std::vector<Integer> expected(count), got(count);
      by_float->to_npu(floats.data(), expected.data(), count);
      CHECK(by_half->to_npu(halves.data(), got.data(), count));
      CHECK(got == expected);
      by_float->to_npu(doubles_as_floats.data(), expected.data(), count);
      CHECK(by_double->to_npu(doubles.data(), got.data(), count));
      CHECK(got == expected);

      by_float->to_host(got.data(), floats.data(), count);
      by_double->to_host(got.data(), doubles.data(), count);
      by_half->to_host(got.data(), halves.data(), count);
      std::vector<uint16_t> expected_halves(count);
      to_half(floats.data(), expected_halves.data(), count);
      CHECK(halves == expected_halves);
      for (size_t i = 0; i < count; ++i) CHECK(doubles[i] == static_cast<double>(floats[i]));
    }
  });
}

TEST(a_real_number_beyond_a_host_s_float16_is_its_largest) {
  const uint16_t q[] = {0, 2, 1, 65535};
  uint16_t half[4];
  converter(ScalarType::kFloat16, abi::DataType::kUFixed16, {true, 70000.0F, -1})
      ->to_host(q, half, 4);
  const uint16_t expected[] = {0xFBFF, 0x7BFF, 0x0000, 0x7BFF};
  CHECK(std::memcmp(half, expected, sizeof half) == 0);
}

// Every length about those of vectors, at addresses that no vector is at; nothing beside is
// touched.
TEST(only_what_is_asked_for_is_converted) {
  for_each_integer([](auto zero) {
    using Integer = decltype(zero);
    const auto found = converter(ScalarType::kFloat32, npu_type<Integer>(), {true, 0.25F, -3});
    for (size_t count = 0; count < 70; ++count) {
      for (size_t shift = 0; shift < 5; ++shift) {
        std::vector<float> from(count + shift, 1.0F);
        std::vector<Integer> to(count + shift + 1, 99);
        CHECK(found->to_npu(from.data() + shift, to.data() + shift, count));
        std::vector<float> back(count + shift + 1, -5.0F);
        found->to_host(to.data() + shift, back.data() + shift, count);
        for (size_t i = 0; i < to.size(); ++i) {
          const bool inside = i >= shift && i < shift + count;
          CHECK_EQ(to[i], inside ? 7 : 99);
          CHECK_EQ(back[i], inside ? 1.0F : -5.0F);
        }
      }
    }
  });
}

TEST(a_converter_needs_types_that_go_together_and_a_valid_encoding) {
  using abi::DataType;
  const float largest = std::numeric_limits<float>::max();
  for (const ScalarType host : {ScalarType::kFloat16, ScalarType::kFloat32, ScalarType::kFloat64}) {
    for (const DataType npu :
         {DataType::kUFixed8, DataType::kSFixed8, DataType::kUFixed16, DataType::kSFixed16}) {
      CHECK(is_quantized(host, npu));
      for (const TensorEncoding& good :
           {TensorEncoding{true, 0x1p-126F, 0}, TensorEncoding{true, largest, kMaxOffset},
            TensorEncoding{true, 1.0F, -kMaxOffset}}) {
        CHECK(good.valid() && converter(host, npu, good));
      }
      CHECK(TensorEncoding{}.valid() && !converter(host, npu));
      for (const TensorEncoding& bad :
           {TensorEncoding{true, 0.0F, 0}, TensorEncoding{true, -1.0F, 0},
            TensorEncoding{true, NAN, 0}, TensorEncoding{true, INFINITY, 0},
            TensorEncoding{true, 1e-40F, 0}, TensorEncoding{true, 1.0F, kMaxOffset + 1},
            TensorEncoding{true, 1.0F, INT32_MIN}, TensorEncoding{true, 1.0F, INT32_MAX}}) {
        CHECK(!bad.valid() && !converter(host, npu, bad));
      }
    }
    for (const DataType npu : {DataType::kSFixed32, DataType::kUFixed32, DataType::kUint8}) {
      CHECK(!is_quantized(host, npu) && !converter(host, npu, {true, 1.0F, 0}));
    }
  }
}

TEST_MAIN()
