// SPDX-License-Identifier: BSD-3-Clause
// What a context binary says about itself, without loading it onto a device.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/api.h"
#include "core/status.h"
#include "graph/tensor.h"
#include "qnn/library.h"

namespace executorch_qnn {

struct GraphDescription {
  std::string name;
  std::vector<TensorSpec> inputs, outputs;
  // What HTP adds; zeros if the binary does not say.
  uint64_t spill_fill_bytes = 0;
  uint64_t vtcm_bytes = 0;
  uint32_t optimization_level = 0;
  uint64_t hvx_threads = 0;
  uint64_t io_bytes = 0, op_bytes = 0, const_bytes = 0, ddr_bytes = 0, shared_weight_bytes = 0;
  bool safe_share_io = false;  // the compiler proved that outputs may overlay inputs
};

struct ContextDescription {
  std::string build_id;  // of the library that compiled it
  abi::Version core_api{}, backend_api{}, blob_version{};
  uint32_t soc_model = 0;
  uint32_t dsp_arch = 0;  // 75 is v75
  std::vector<GraphDescription> graphs;

  const GraphDescription* find(const std::string& graph) const;
};

// `binary` may be a read-only mapping. Needs libQnnSystem.so.
ETQNN_API Result<ContextDescription> inspect_context(const Library& library, const void* binary,
                                                     uint64_t size);

}  // namespace executorch_qnn
