// SPDX-License-Identifier: BSD-3-Clause
// The part of the QNN C ABI that this backend uses, described by us: the QNN libraries only see
// binary layouts, never these names. Pinned by static_asserts for LP64 (x86_64 and aarch64 give the
// same numbers) and checked by the tests against QAIRT 2.47 to 2.51, that is core API 2.36 to 2.40.
//
// The interface tables grow at their tail with the core minor version and nothing tells their
// length: see library.cpp for how much of a table may be read.
#pragma once

#include <cstdarg>
#include <cstddef>
#include <cstdint>

namespace executorch_qnn::abi {

using Error = uint64_t;  // 0 is success
using Handle = void*;    // backend, device, context, graph, log, profile, memory

// The number under which an error is documented; the upper bits are not part of it.
constexpr uint64_t error_code(Error error) { return error & 0xFFFF; }

enum : uint64_t {
  kErrorContextBinary = 5000,
  kErrorDeviceConfig = 14001,
};

// ------------------------------------------------------------------------------------- versions

struct Version {
  uint32_t major, minor, patch;
};

struct ApiVersion {
  Version core, backend;
};

// ------------------------------------------------------------------------------------- tensors

enum class DataType : uint32_t {
  kInt8 = 0x008,
  kInt16 = 0x016,
  kInt32 = 0x032,
  kInt64 = 0x064,
  kUint8 = 0x108,
  kUint16 = 0x116,
  kUint32 = 0x132,
  kUint64 = 0x164,
  kFloat16 = 0x216,
  kFloat32 = 0x232,
  kSFixed8 = 0x308,
  kSFixed16 = 0x316,
  kSFixed32 = 0x332,
  kUFixed8 = 0x408,
  kUFixed16 = 0x416,
  kUFixed32 = 0x432,
  kBool8 = 0x508,
};

enum class TensorKind : uint32_t {
  kInput = 0,   // the client writes it before execute
  kOutput = 1,  // the client reads it after execute
  kNative = 3,  // lives inside the graph
  kStatic = 4,  // constant; its data is copied when it is created
};

enum class MemoryKind : uint32_t { kRaw = 0, kHandle = 1 };

enum class EncodingKind : uint32_t {
  kScaleOffset = 0,
  kAxisScaleOffset = 1,
  kBitWidthScaleOffset = 2,
  kBitWidthAxisScaleOffset = 3,
  kBlockwiseExpansion = 5,
  kUndefined = 0x7FFFFFFF,
};

enum : uint32_t { kEncodingDefined = 1, kEncodingUndefined = 0x7FFFFFFF };

// real = (q + offset) * scale: the offset is minus the zero point.
struct ScaleOffset {
  float scale;
  int32_t offset;
};

struct AxisScaleOffset {
  int32_t axis;
  uint32_t count;
  const ScaleOffset* values;
};

struct BitWidthScaleOffset {
  uint32_t bits;
  float scale;
  int32_t offset;
};

struct BitWidthAxisScaleOffset {
  uint32_t bits;
  int32_t axis;
  uint32_t count;
  const float* scales;
  const int32_t* offsets;  // null: all zero
};

// The scale of block b of channel c is channels[c].scale * block_scales[c * blocks_per_axis + b].
struct BlockwiseExpansion {
  int32_t axis;
  const ScaleOffset* channels;
  uint32_t blocks_per_axis;
  uint32_t scale_bits;
  uint32_t storage;  // 0: block scales are bytes
  const uint8_t* block_scales;
};

struct QuantizeParams {
  uint32_t definition;
  EncodingKind encoding;
  union {
    ScaleOffset scale_offset;
    AxisScaleOffset axis;
    BitWidthScaleOffset bit_width;
    BitWidthAxisScaleOffset bit_width_axis;
    const BlockwiseExpansion* blockwise;
    uint64_t room[4];
  };
};
static_assert(sizeof(QuantizeParams) == 40);
static_assert(offsetof(QuantizeParams, scale_offset) == 8);
static_assert(sizeof(BlockwiseExpansion) == 40);

struct ClientBuffer {
  void* data;
  uint32_t size;  // bytes; execute does not check it, so we must
};

struct TensorV1 {
  uint32_t id;  // given by tensor creation; execute finds tensors by it and by nothing else
  const char* name;
  TensorKind kind;
  uint32_t format;  // 0: dense, row-major
  DataType dtype;
  QuantizeParams quantize;
  uint32_t rank;
  const uint32_t* dims;
  MemoryKind memory;
  union {
    ClientBuffer buffer;
    Handle handle;
  };
};
static_assert(offsetof(TensorV1, name) == 8 && offsetof(TensorV1, kind) == 16);
static_assert(offsetof(TensorV1, format) == 20 && offsetof(TensorV1, dtype) == 24);
static_assert(offsetof(TensorV1, quantize) == 32 && offsetof(TensorV1, rank) == 72);
static_assert(offsetof(TensorV1, dims) == 80 && offsetof(TensorV1, memory) == 88);
static_assert(offsetof(TensorV1, buffer) == 96 && sizeof(TensorV1) == 112);

// Version 2 begins with the fields of version 1; its tail is of no use to us.
struct Tensor {
  uint32_t version;
  TensorV1 v1;
  uint64_t v2_tail[3];
};
static_assert(offsetof(Tensor, v1) == 8 && sizeof(Tensor) == 144);

// ------------------------------------------------------------------------------------- nodes

struct Scalar {
  DataType dtype;
  union {
    float f32;
    int64_t i64;
    uint64_t u64;
    int32_t i32;
    uint32_t u32;
    int16_t i16;
    uint16_t u16;
    int8_t i8;
    uint8_t u8;  // and booleans
  };
};
static_assert(sizeof(Scalar) == 16 && offsetof(Scalar, f32) == 8);

enum class ParamKind : uint32_t { kScalar = 0, kTensor = 1 };

struct Param {
  ParamKind kind;
  const char* name;
  union {
    Scalar scalar;
    Tensor tensor;
  };
};
static_assert(sizeof(Param) == 160 && offsetof(Param, scalar) == 16);

struct OpConfigV1 {
  const char* name;
  const char* package;
  const char* type;
  uint32_t n_params;
  Param* params;
  uint32_t n_inputs;
  Tensor* inputs;
  uint32_t n_outputs;
  Tensor* outputs;
};

// Passed by value.
struct OpConfig {
  uint32_t version;  // 1
  OpConfigV1 v1;
};
static_assert(sizeof(OpConfig) == 80 && offsetof(OpConfig, v1) == 8);

inline constexpr char kOpPackage[] = "qti.aisw";

// -------------------------------------------------------------------------------------
// configuration Every create function takes a null-terminated array of pointers to {option,
// payload}; option 0 means a backend-specific payload, the Htp structs below.

struct Config {
  uint32_t option;
  union {
    const void* custom;
    uint64_t room[2];
  };
};
static_assert(offsetof(Config, custom) == 8 && sizeof(Config) == 24);
enum : uint32_t { kConfigCustom = 0 };

// The payload of this struct lies at +8 in most versions (2.47, 2.48, 2.50, 2.51) and at +4 in 2.49
// and in SDKs up to 2.43, and nothing in it tells which. A SoC number in both places, in a block
// large enough for either reading, is understood by all. Without it the compiler silently targets
// HTP v68.
struct HtpDeviceConfig {
  uint32_t option;  // 0: SoC model
  uint32_t at4;
  uint32_t at8;
  uint32_t padding[5];
};
static_assert(sizeof(HtpDeviceConfig) == 32);

enum class HtpGraphOption : uint32_t {
  kOptimization = 1,
  kPrecision = 2,
  kVtcmMegabytes = 3,
  kHvxThreads = 6,
  kShareIo = 14,
};
enum : uint32_t { kOptimizationLevel = 3, kPrecisionFloat16 = 1 };

struct HtpGraphConfig {
  HtpGraphOption option;
  union {
    struct {
      uint32_t type;
      float value;
    } optimization;
    uint32_t u32;
    uint64_t u64;
    uint8_t flag;
    uint64_t room[8];
  };
};
static_assert(offsetof(HtpGraphConfig, u64) == 8);

enum class HtpContextOption : uint32_t { kWeightSharing = 1 };

struct HtpContextConfig {
  HtpContextOption option;
  union {
    uint8_t flag;
    uint64_t room[2];
  };
};
static_assert(offsetof(HtpContextConfig, flag) == 8);

// ------------------------------------------------------------------------------------- shared
// memory

enum class MemDescriptorKind : uint32_t { kIon = 1, kCustom = 2, kDmaBuf = 3 };

struct MemDescriptor {
  uint32_t rank;
  const uint32_t* dims;
  const char* shape_config;
  DataType dtype;
  MemDescriptorKind kind;
  union {
    struct {
      int32_t fd;
    } ion;
    const void* custom;
    struct {
      int32_t fd;
      void* data;
    } dma_buf;
  };
};
static_assert(sizeof(MemDescriptor) == 48 && offsetof(MemDescriptor, dtype) == 24);
static_assert(offsetof(MemDescriptor, kind) == 28 && offsetof(MemDescriptor, ion) == 32);

enum class HtpMemKind : uint32_t { kSharedBuffer = 1 };

struct HtpMemDescriptor {
  HtpMemKind kind;
  uint64_t total_size;
  int32_t fd;
  uint64_t offset;
};
static_assert(sizeof(HtpMemDescriptor) == 32 && offsetof(HtpMemDescriptor, fd) == 16);

// ------------------------------------------------------------------------------------- log,
// profile

enum class LogLevel : uint32_t { kError = 1, kWarning = 2, kInfo = 3, kVerbose = 4, kDebug = 5 };

using LogCallback = void (*)(const char* format, LogLevel level, uint64_t timestamp, va_list args);

struct ProfileEvent {
  uint32_t type;
  uint32_t unit;  // 1 microseconds, 3 cycles, 4 count
  uint64_t value;
  const char* name;
};

// ------------------------------------------------------------------------------------- the tables

using Unused = void*;

// The backend interface of core API 2.x, in table order.
struct Interface {
  Unused property_has_capability;
  Error (*backend_create)(Handle log, const Config* const* configs, Handle* backend);
  Unused backend_set_config;
  Error (*backend_get_api_version)(ApiVersion* version);
  Error (*backend_get_build_id)(const char** id);
  Unused backend_register_op_package, backend_get_supported_operations;
  Error (*backend_validate_op_config)(Handle backend, OpConfig config);
  Error (*backend_free)(Handle backend);
  Error (*context_create)(Handle backend, Handle device, const Config* const* configs,
                          Handle* context);
  Unused context_set_config;
  Error (*context_get_binary_size)(Handle context, uint64_t* size);
  Error (*context_get_binary)(Handle context, void* buffer, uint64_t size, uint64_t* written);
  Error (*context_create_from_binary)(Handle backend, Handle device, const Config* const* configs,
                                      const void* binary, uint64_t size, Handle* context,
                                      Handle profile);
  Error (*context_free)(Handle context, Handle profile);
  Error (*graph_create)(Handle context, const char* name, const Config* const* configs,
                        Handle* graph);
  Unused graph_create_subgraph, graph_set_config;
  Error (*graph_add_node)(Handle graph, OpConfig config);
  Error (*graph_finalize)(Handle graph, Handle profile, Handle signal);
  Error (*graph_retrieve)(Handle context, const char* name, Handle* graph);
  Error (*graph_execute)(Handle graph, const Tensor* inputs, uint32_t n_inputs, Tensor* outputs,
                         uint32_t n_outputs, Handle profile, Handle signal);
  Unused graph_execute_async, tensor_create_context_tensor;
  Error (*tensor_create_graph_tensor)(Handle graph, Tensor* tensor);
  Error (*log_create)(LogCallback callback, LogLevel level, Handle* log);
  Error (*log_set_level)(Handle log, LogLevel level);
  Error (*log_free)(Handle log);
  Error (*profile_create)(Handle backend, uint32_t level, Handle* profile);
  Unused profile_set_config;
  Error (*profile_get_events)(Handle profile, const uint64_t** events, uint32_t* count);
  Error (*profile_get_sub_events)(uint64_t event, const uint64_t** events, uint32_t* count);
  Error (*profile_get_event_data)(uint64_t event, ProfileEvent* data);
  Unused profile_get_extended_event_data;
  Error (*profile_free)(Handle profile);
  Error (*mem_register)(Handle context, const MemDescriptor* descriptors, uint32_t count,
                        Handle* handles);
  Error (*mem_deregister)(const Handle* handles, uint32_t count);
  Unused device_get_platform_info, device_free_platform_info;
  Error (*device_get_infrastructure)(const void** infrastructure);
  Error (*device_create)(Handle log, const Config* const* configs, Handle* device);
  Unused device_set_config, device_get_info;
  Error (*device_free)(Handle device);
  Unused signal_create, signal_set_config, signal_trigger, signal_free;
  Error (*error_get_message)(Error error, const char** message);
  Unused error_get_verbose_message, error_free_verbose_message;
  Unused graph_prepare_environment, graph_release_environment, graph_get_property;
  Unused context_validate_binary, context_create_from_binary_with_signal;
  Unused context_create_from_binary_list_async;
  Unused tensor_update_graph_tensors, tensor_update_context_tensors;
  Unused context_get_binary_section_size, context_get_binary_section, context_apply_binary_section;
  Unused backend_get_property, context_get_property;
  Unused context_get_incremental_binary, context_release_incremental_binary, context_finalize;
  Unused global_config_set, context_create_from_binary_with_callback;
  Unused context_get_binary_section_update, context_free_binary_section_update, context_add_to_dlc;
  // From core 2.40 on; in older libraries the words here are unrelated data.
  Unused graph_validate, graph_free_validation_result, backend_register_op_package_from_binary;
};
static_assert(offsetof(Interface, graph_validate) == 72 * sizeof(void*));
static_assert(sizeof(Interface) == 75 * sizeof(void*));

struct Provider {
  uint32_t backend_id;
  const char* name;
  ApiVersion version;
  Interface interface;
};
static_assert(offsetof(Provider, version) == 16 && offsetof(Provider, interface) == 40);

enum : uint32_t { kBackendHtp = 6 };
inline constexpr char kGetProviders[] = "QnnInterface_getProviders";
using GetProviders = Error (*)(const Provider* const** providers, uint32_t* count);

// -------------------------------------------------------------------------------------
// introspection

struct GraphInfoV1 {
  const char* name;
  uint32_t n_inputs;
  const Tensor* inputs;
  uint32_t n_outputs;
  const Tensor* outputs;
};

struct GraphInfoV3 {
  GraphInfoV1 v1;
  uint32_t n_updateable;
  const Tensor* updateable;
  uint32_t blob_size;
  const void* blob;
  uint32_t start_op, end_op;
};

struct GraphInfo {
  uint32_t version;  // 1, 2 or 3; each begins with the fields of the one before
  GraphInfoV3 v3;
};
static_assert(sizeof(GraphInfo) == 88);

struct BinaryInfoV3 {
  uint32_t backend_id;
  const char* build_id;
  Version core, backend;
  const char* soc;
  Version blob_version;
  uint64_t blob_size;
  uint32_t n_context_tensors;
  const Tensor* context_tensors;
  uint32_t n_graphs;
  const GraphInfo* graphs;
  const void* platform;
  uint32_t meta_size;
  const uint32_t* meta;  // {version 1, DSP architecture}
  uint32_t soc_model;
};

struct BinaryInfo {
  uint32_t version;  // 3 is the only one we know how to read
  BinaryInfoV3 v3;
};

// What HTP adds to a graph's information.
struct HtpGraphBlob {
  uint32_t version;  // 1
  uint64_t spill_fill_bytes;
  uint32_t vtcm_bytes, optimization_level;
  uint8_t dlbc;
  uint64_t hvx_threads;
  struct {
    uint32_t version;  // 2
    uint64_t native_k, native_v;
    uint32_t safe_share_io;
    uint64_t io_bytes, op_bytes, const_bytes, ddr_bytes, shared_weight_bytes;
  } v2;
};
static_assert(offsetof(HtpGraphBlob, v2) == 40 && sizeof(HtpGraphBlob) == 112);

// The system interface, API 1.x; the table goes on.
struct SystemInterface {
  Error (*context_create)(Handle* context);
  Error (*context_get_binary_info)(Handle context, void* binary, uint64_t size,
                                   const BinaryInfo** info, uint64_t* info_size);
  Error (*context_get_metadata)(Handle context, const void* binary, uint64_t size,
                                const BinaryInfo** info);
  Error (*context_free)(Handle context);
};

struct SystemProvider {
  uint32_t system_id;
  const char* name;
  Version version;
  SystemInterface interface;
};
static_assert(offsetof(SystemProvider, version) == 16 && offsetof(SystemProvider, interface) == 32);

inline constexpr char kGetSystemProviders[] = "QnnSystemInterface_getProviders";
using GetSystemProviders = Error (*)(const SystemProvider* const** providers, uint32_t* count);

}  // namespace executorch_qnn::abi
