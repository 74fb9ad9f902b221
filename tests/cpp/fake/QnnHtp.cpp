// SPDX-License-Identifier: BSD-3-Clause
// A stand-in for libQnnHtp.so: it keeps books instead of computing. Its interface table ends right
// before memory that cannot be read, as long as its core minor version says, so that reading past
// the table is a crash. What it does:
//
//   validate: refuses ops of type "Bad" with two lines in its log, each said twice
//   finalize: prints a DDR summary on fd 1 (core below 2.39) or logs it at INFO; fails for graph
//   "bad" binary:   {graph count} and 99 zeros, of which 80 bytes are written load:     refuses
//   with 5000 what starts with 'O' execute:  copies the first input over the first output; fails
//   for a graph named "bad"
//
// fake_calls() is a journal of what was created and freed, one letter each: L l log, B b backend,
// D d device, C c context, G graph. The lower case letter is the end of it.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>

#include "qnn/abi.h"

#ifndef FAKE_CORE_MAJOR
#define FAKE_CORE_MAJOR 2
#endif
#ifndef FAKE_CORE_MINOR
#define FAKE_CORE_MINOR 40
#endif
#ifndef FAKE_ENTRY
#define FAKE_ENTRY QnnInterface_getProviders
#endif
#ifndef FAKE_BACKEND_ID
#define FAKE_BACKEND_ID 6
#endif

using namespace executorch_qnn::abi;

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

std::string g_journal;
LogCallback g_log = nullptr;
LogLevel g_level = LogLevel::kError;
uint32_t g_next_tensor = 1;
uint32_t g_soc_at4 = 0, g_soc_at8 = 0;
Tensor g_last_tensor{};
std::string g_last_graph;
int g_log_handle, g_backend, g_device, g_context, g_graph, g_bad_graph;

void log_line(LogLevel level, const char* format, ...) {
  if (g_log == nullptr || level > g_level) return;
  va_list args;
  va_start(args, format);
  g_log(format, level, 0, args);
  va_end(args);
}

template <int* kObject>
Error make(char letter, Handle* handle) {
  g_journal += letter;
  *handle = kObject;
  return 0;
}

Error log_create(LogCallback callback, LogLevel level, Handle* log) {
  g_log = callback;
  g_level = level;
  return make<&g_log_handle>('L', log);
}

Error log_set_level(Handle, LogLevel level) {
  g_level = level;
  return 0;
}

Error log_free(Handle) {
  g_journal += 'l';
  g_log = nullptr;
  return 0;
}

Error backend_create(Handle, const Config* const*, Handle* backend) {
  return make<&g_backend>('B', backend);
}

Error backend_free(Handle) {
  g_journal += 'b';
  return 0;
}

Error get_build_id(const char** id) {
  *id = "v2.fake";
  return 0;
}

Error device_create(Handle, const Config* const* configs, Handle* device) {
  if (configs != nullptr) {
    const auto* soc = static_cast<const HtpDeviceConfig*>(configs[0]->custom);
    g_soc_at4 = soc->at4;
    g_soc_at8 = soc->at8;
    if (soc->at8 == 999) return 14001;
  }
  return make<&g_device>('D', device);
}

Error device_free(Handle) {
  g_journal += 'd';
  return 0;
}

Error context_create(Handle, Handle, const Config* const*, Handle* context) {
  return make<&g_context>('C', context);
}

Error context_from_binary(Handle, Handle, const Config* const*, const void* binary, uint64_t,
                          Handle* context, Handle) {
  if (*static_cast<const char*>(binary) == 'O') return 5000;
  return make<&g_context>('C', context);
}

Error context_free(Handle, Handle) {
  g_journal += 'c';
  return 0;
}

Error get_binary_size(Handle, uint64_t* size) {
  *size = 100;
  return 0;
}

Error get_binary(Handle, void* buffer, uint64_t size, uint64_t* written) {
  std::memset(buffer, 0, size);
  *static_cast<char*>(buffer) = 1;
  *written = 80;
  return 0;
}

Error graph_create(Handle, const char* name, const Config* const*, Handle* graph) {
  g_journal += 'G';
  g_last_graph = name;
  *graph = g_last_graph == "bad" ? &g_bad_graph : &g_graph;
  return 0;
}

Error graph_retrieve(Handle, const char* name, Handle* graph) {
  *graph = std::strcmp(name, "bad") == 0 ? &g_bad_graph : &g_graph;
  return 0;
}

Error tensor_create(Handle, Tensor* tensor) {
  if (std::strcmp(tensor->v1.name, "bad") == 0) {
    log_line(LogLevel::kError, "no %s tensors today\n", "bad");
    return 7004;
  }
  tensor->v1.id = g_next_tensor++;
  g_last_tensor = *tensor;
  return 0;
}

Error validate(Handle, OpConfig config) {
  if (std::strcmp(config.v1.type, "Bad") != 0) return 0;
  for (int i = 0; i < 2; ++i) {
    log_line(LogLevel::kError, "<E> %s is %d times bad\n", config.v1.name, 7);
    // QNN logs from threads of its own as well.
    std::thread([] { log_line(LogLevel::kError, "a worker thread agrees"); }).join();
  }
  log_line(LogLevel::kWarning, "this is not an error");
  return 3110;
}

Error add_node(Handle, OpConfig) { return 0; }

Error finalize(Handle graph, Handle, Handle) {
  static const char* const kLines[] = {"Starting stage: Everything",
                                       "====== DDR bandwidth summary ======",
                                       "spill_bytes=3",
                                       "fill_bytes=4",
                                       "write_total_bytes=2048",
                                       "read_total_bytes=8192",
                                       "Completed stage: Everything",
                                       "graph_prepare.cc:12: nobody wants to know"};
  for (const char* line : kLines) {
#if FAKE_CORE_MINOR < 39
    std::printf("%s\n", line);
#else
    log_line(LogLevel::kInfo, "%s\n", line);
#endif
  }
  if (graph != &g_bad_graph) return 0;
  log_line(LogLevel::kError, "out of luck");
  return (1ull << 32) | 1002;  // the upper bits are not part of the code
}

Error execute(Handle graph, const Tensor* inputs, uint32_t n_inputs, Tensor* outputs,
              uint32_t n_outputs, Handle, Handle) {
  if (graph == &g_bad_graph) {
    log_line(LogLevel::kError, "execution went wrong");
    return 6031;
  }
  if (n_inputs > 0 && n_outputs > 0) {
    std::memmove(outputs[0].v1.buffer.data, inputs[0].v1.buffer.data, inputs[0].v1.buffer.size);
  }
  return 0;
}

Error get_message(Error error, const char** message) {
  if (error_code(error) == 1) return 10001;
  *message = "FAKE_ERROR: something";
  return 0;
}

// The provider, with its table right before a page without access.
const Provider* make_provider() {
  static_assert(sizeof(Provider) < 4096);
  constexpr size_t kPage = 4096;
  constexpr size_t kTable =
      FAKE_CORE_MINOR >= 40 ? sizeof(Interface) : offsetof(Interface, graph_validate);
  constexpr size_t kLonger = FAKE_CORE_MINOR > 40 ? 10 * sizeof(void*) : 0;
  constexpr size_t kSize = offsetof(Provider, interface) + kTable + kLonger;
  auto* pages = static_cast<char*>(
      mmap(nullptr, 2 * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  mprotect(pages + kPage, kPage, PROT_NONE);

  static Provider whole{};
  whole.backend_id = FAKE_BACKEND_ID;
  whole.name = "HTP_FAKE";
  whole.version = {{FAKE_CORE_MAJOR, FAKE_CORE_MINOR, 0}, {5, FAKE_CORE_MINOR + 11, 0}};
  Interface& table = whole.interface;
  table.log_create = log_create;
  table.log_set_level = log_set_level;
  table.log_free = log_free;
  table.backend_create = backend_create;
  table.backend_free = backend_free;
  table.backend_get_build_id = get_build_id;
  table.backend_validate_op_config = validate;
  table.device_create = device_create;
  table.device_free = device_free;
  table.context_create = context_create;
  table.context_create_from_binary = context_from_binary;
  table.context_free = context_free;
  table.context_get_binary_size = get_binary_size;
  table.context_get_binary = get_binary;
  table.graph_create = graph_create;
  table.graph_retrieve = graph_retrieve;
  table.graph_add_node = add_node;
  table.graph_finalize = finalize;
  table.graph_execute = execute;
  table.tensor_create_graph_tensor = tensor_create;
  table.error_get_message = get_message;
  char* provider = pages + kPage - kSize;
  std::memcpy(provider, &whole, kSize - kLonger);
  return reinterpret_cast<const Provider*>(provider);
}

}  // namespace

EXPORT Error FAKE_ENTRY(const Provider* const** providers, uint32_t* count) {
  static const Provider* const provider = make_provider();
  std::printf("LIBNATIVE: noise on stdout\n");
  std::fflush(stdout);
  *providers = &provider;
  *count = 1;
  return 0;
}

EXPORT const char* fake_calls() { return g_journal.c_str(); }
EXPORT void fake_reset() { g_journal.clear(); }
EXPORT uint32_t fake_soc(bool at8) { return at8 ? g_soc_at8 : g_soc_at4; }
EXPORT const Tensor* fake_last_tensor() { return &g_last_tensor; }
