// SPDX-License-Identifier: BSD-3-Clause
// The delegate blob of a .pte: which graph of which context binary, and how its tensors meet the
// delegate's arguments and the state. Written by compile/payload.py; docs/adr describes the format.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/api.h"
#include "core/digest.h"
#include "core/status.h"
#include "memory/convert.h"
#include "state/descriptor.h"
#include "state/store.h"

namespace executorch_qnn {

// One argument of the delegate call.
struct PayloadTensor {
  std::string tensor;  // the graph's name for it; empty: the graph does not use this argument
  ScalarType host_type{};
  abi::DataType npu_type{};
  std::vector<uint32_t> dims;      // of the argument
  std::vector<uint32_t> npu_dims;  // of the graph's tensor
  TensorEncoding encoding;
  Converter converter;  // if the graph uses it

  size_t elements() const;
};

// What a graph puts out of a buffer that it changes in some rows only. The buffer, whatever its
// shape, is `outer` blocks of `length` rows of `row` elements; the graph puts out `outer` blocks of
// `count` rows, from element `offset` on of its tensor, and where they belong: `count` INT32.
struct PayloadRows {
  std::string positions;  // the graph's name for them
  uint64_t offset = 0;
  uint32_t outer = 0, length = 0, row = 0, count = 0;
};

// One mutable buffer of the graph.
struct PayloadState {
  StateDescriptor descriptor;
  abi::DataType npu_type{};  // of the graph's tensors; values are converted if it is not the slot's
  std::string input;         // the graph's name for reading it; empty: it does not
  std::string output;        // for writing it
  StateBinding binding{};
  PayloadRows rows;  // with kDelta
  float scale = 1;   // with kAccumulate: the graph puts out so many times what is to be added
  std::string initial_key;  // in the named data; empty: zeros
};

struct Payload {
  std::string method;
  std::string graph;
  std::string context_key;  // in the named data
  Digest context_digest{};
  uint64_t context_size = 0;
  std::string build_id;  // of the QAIRT that compiled it
  uint32_t core_major = 0, core_minor = 0;
  uint32_t soc_model = 0, htp_arch = 0;
  std::string target;
  std::vector<PayloadTensor> inputs, outputs;
  std::vector<PayloadState> states;
};

// Reads a blob. kInvalid: it is damaged. kIncompatible: a newer version wrote it.
ETQNN_API Result<Payload> parse_payload(const void* data, size_t size);

}  // namespace executorch_qnn
