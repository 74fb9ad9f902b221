// SPDX-License-Identifier: BSD-3-Clause
// The payload reader: everything it should read, and nothing else, whatever the bytes.
#include <cmath>
#include <random>

#include "runtime/support.h"

using namespace support;

namespace {

Payload full_payload() {
  auto p = payload(
      "decode_0",
      {state("k", StateBinding::kInPlace, {1, 8, 64}, ScalarType::kFloat32,
             abi::DataType::kFloat16),
       state("v", StateBinding::kDoubleBuffer), state("r", StateBinding::kReadOnly),
       state("w", StateBinding::kWriteOnly, {})},
      {tensor("tokens", ScalarType::kInt64, abi::DataType::kInt32, {1, 1}),
       tensor("mask", ScalarType::kBool, abi::DataType::kBool8, {1, 8}),
       tensor("", ScalarType::kFloat32, abi::DataType::kFloat16, {3}),
       tensor("x", ScalarType::kFloat64, abi::DataType::kUFixed16, {5}, {true, 0.125f, -32768})},
      {tensor("logits", ScalarType::kFloat32, abi::DataType::kFloat16, {1, 100}),
       tensor("raw", ScalarType::kUint16, abi::DataType::kUFixed16, {5})});
  p.states[1].initial_key = "v_initial";
  p.states[0].descriptor.encoding = {true, 0.25f, -3};
  p.context_size = 1234;
  for (size_t i = 0; i < p.context_digest.size(); ++i) {
    p.context_digest[i] = static_cast<uint8_t>(7 * i);
  }
  return p;
}

ErrorKind kind_of(const Bytes& bytes) {
  return parse_payload(bytes.data(), bytes.size()).status().kind();
}

}  // namespace

TEST(every_field_comes_back) {
  const Payload p = full_payload();
  const Bytes bytes = pack(p);
  CHECK_VALUE(read, parse_payload(bytes.data(), bytes.size()));
  CHECK_EQ(read.method, "forward");
  CHECK_EQ(read.graph, "decode_0");
  CHECK_EQ(read.context_key, "context");
  CHECK(read.context_digest == p.context_digest);
  CHECK_EQ(read.context_size, 1234u);
  CHECK_EQ(read.build_id, "v2.null");
  CHECK_EQ(read.core_minor, 40u);
  CHECK_EQ(read.soc_model, 57u);
  CHECK_EQ(read.htp_arch, 75u);
  CHECK_EQ(read.target, "SM8650");
  CHECK_EQ(read.inputs.size(), 4u);
  CHECK(read.inputs[0].converter.kind == Conversion::kInt64Int32);
  CHECK(read.outputs[0].converter.kind == Conversion::kFloat32Half);
  CHECK(read.inputs[3].encoding == p.inputs[3].encoding);
  CHECK(read.inputs[3].converter.kind == Conversion::kQuantized);
  CHECK(read.inputs[3].converter.encoding == p.inputs[3].encoding);
  CHECK(read.outputs[1].converter.kind == Conversion::kNone);
  CHECK_EQ(read.states.size(), 4u);
  for (size_t i = 0; i < 4; ++i) {
    CHECK(read.states[i].descriptor == p.states[i].descriptor);
    CHECK_EQ(read.states[i].input, p.states[i].input);
    CHECK_EQ(read.states[i].output, p.states[i].output);
    CHECK_EQ(read.states[i].initial_key, p.states[i].initial_key);
  }
}

TEST(padding_behind_the_payload_is_allowed) {
  Bytes bytes = pack(full_payload());
  bytes.resize(bytes.size() + 64, 0xAB);
  CHECK(kind_of(bytes) == ErrorKind::kNone);
}

TEST(a_later_minor_version_may_append_fields) {
  Bytes more = body(full_payload());
  more.resize(more.size() + 20, 9);
  CHECK(kind_of(seal(more, 2, 7)) == ErrorKind::kNone);
  CHECK(kind_of(seal(more, 2, 0)) == ErrorKind::kInvalid);
}

TEST(another_major_version_is_incompatible_not_damaged) {
  for (uint16_t major : {0, 1, 3, 255}) {
    const Bytes bytes = seal(body(full_payload()), major);
    const Status status = parse_payload(bytes.data(), bytes.size()).status();
    CHECK(status.kind() == ErrorKind::kIncompatible);
    CHECK_CONTAINS(status.message(), "upgrade executorch-qnn");
  }
}

TEST(values_of_a_newer_version_are_incompatible) {
  Payload p = full_payload();
  p.inputs[0].npu_type = static_cast<abi::DataType>(0x226);
  CHECK(kind_of(pack(p)) == ErrorKind::kIncompatible);
  p = full_payload();
  p.states[0].binding = static_cast<StateBinding>(17);
  CHECK(kind_of(pack(p)) == ErrorKind::kIncompatible);
}

TEST(contradictions_are_damage) {
  Payload p = full_payload();
  p.states[1].descriptor.name = p.states[0].descriptor.name;
  CHECK(kind_of(pack(p)) == ErrorKind::kInvalid);
  p = full_payload();
  p.states[0].output.clear();
  CHECK(kind_of(pack(p)) == ErrorKind::kInvalid);
  p = full_payload();
  p.inputs[0].npu_dims = {7};
  CHECK(kind_of(pack(p)) == ErrorKind::kInvalid);
  p = full_payload();
  p.inputs[0].dims = p.inputs[0].npu_dims = {0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF};
  CHECK(kind_of(pack(p)) == ErrorKind::kInvalid);
  p = full_payload();
  p.outputs[0].tensor.clear();
  CHECK(kind_of(pack(p)) == ErrorKind::kInvalid);
}

TEST(real_numbers_in_integers_need_an_encoding_that_can_be_computed_with) {
  const TensorEncoding wrong[] = {{},
                                  {true, 0.0f, 0},
                                  {true, -0.5f, 0},
                                  {true, NAN, 0},
                                  {true, INFINITY, 0},
                                  {true, 1e-40f, 0},
                                  {true, 1.0f, INT32_MIN},
                                  {true, 1.0f, INT32_MAX}};
  for (const TensorEncoding& encoding : wrong) {
    Payload input = full_payload(), output = full_payload(), slot = full_payload();
    input.inputs[3].encoding = encoding;
    output.outputs[0].npu_type = abi::DataType::kSFixed8;
    output.outputs[0].encoding = encoding;
    PayloadState& state = slot.states[0];
    state.descriptor.stored_type = state.npu_type = abi::DataType::kUFixed8;
    state.descriptor.encoding = encoding;
    for (const Payload& p : {input, output, slot}) {
      const Bytes bytes = pack(p);
      const Status status = parse_payload(bytes.data(), bytes.size()).status();
      CHECK(status.kind() == ErrorKind::kInvalid);
      CHECK_CONTAINS(status.message(), "encoding of ");
    }
  }
  // Nobody asks what the scale of something else is, but an encoding is an encoding.
  Payload p = full_payload();
  p.outputs[1].encoding = {true, 0.0f, 0};
  CHECK(kind_of(pack(p)) == ErrorKind::kInvalid);
  p.outputs[1].encoding = {true, 0.5f, -1};
  CHECK(kind_of(pack(p)) == ErrorKind::kNone);
}

TEST(integers_of_32_bits_for_real_numbers_are_of_a_newer_version) {
  Payload p = full_payload();
  p.inputs[3].npu_type = abi::DataType::kSFixed32;
  CHECK(kind_of(pack(p)) == ErrorKind::kIncompatible);
}

TEST(rows_of_a_quantized_buffer_are_rows) {
  Payload p = full_payload();
  p.states.push_back(delta("q", {8, 2}, "rows", {"at", 3, 1, 8, 2, 1}));
  PayloadState& state = p.states.back();
  state.descriptor.host_type = ScalarType::kFloat32;
  state.descriptor.stored_type = state.npu_type = abi::DataType::kUFixed8;
  state.descriptor.encoding = {true, 0.5f, -128};
  CHECK(kind_of(pack(p)) == ErrorKind::kNone);
  state.npu_type = abi::DataType::kUFixed16;  // they are placed as they come
  CHECK(kind_of(pack(p)) == ErrorKind::kInvalid);
}

TEST(every_truncation_is_refused) {
  const Bytes bytes = pack(full_payload());
  for (size_t size = 0; size < bytes.size(); ++size) {
    // A copy of its own, so that AddressSanitizer sees a read behind it.
    const Bytes cut(bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(size));
    CHECK(kind_of(cut) == ErrorKind::kInvalid);
  }
  CHECK(parse_payload(nullptr, 0).status().kind() == ErrorKind::kInvalid);
}

TEST(every_bit_flip_is_refused) {
  const Bytes bytes = pack(full_payload());
  for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    Bytes flipped = bytes;
    flipped[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
    const ErrorKind kind = kind_of(flipped);
    // Of the header, the checksum leaves out the version; a minor version may differ.
    const bool minor = bit / 8 == 10 || bit / 8 == 11;
    CHECK(kind != ErrorKind::kNone || minor);
  }
}

// What somebody would write who knows about the checksum.
TEST(ten_thousand_mutations_with_a_right_checksum_do_no_harm) {
  std::mt19937 random(1);
  const Bytes good = body(full_payload());
  size_t accepted = 0;
  for (int round = 0; round < 10000; ++round) {
    Bytes mutated = good;
    const int changes = 1 + static_cast<int>(random() % 4);
    for (int i = 0; i < changes; ++i) {
      const size_t at = random() % mutated.size();
      if (random() % 4 == 0) {
        const uint32_t values[] = {0, 0xFFFFFFFF, 0x7FFFFFFF, 0x80000000, 0x10000, 0xFFFF};
        const uint32_t value = values[random() % 6];
        std::memcpy(mutated.data() + std::min(at, mutated.size() - 4), &value, 4);
      } else {
        mutated[at] ^= static_cast<uint8_t>(1 << random() % 8);
      }
    }
    if (random() % 8 == 0) mutated.resize(random() % mutated.size());
    const Bytes sealed = seal(mutated, 2, static_cast<uint16_t>(random() % 2));
    accepted += kind_of(sealed) == ErrorKind::kNone;
  }
  std::fprintf(stderr, "%zu of 10000 accepted\n", accepted);
}

TEST_MAIN()
