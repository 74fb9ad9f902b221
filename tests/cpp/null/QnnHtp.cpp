// SPDX-License-Identifier: BSD-3-Clause
// A stand-in for libQnnHtp.so that runs contexts of null/format.h. An execution does next to
// nothing and allocates nothing, so that everything a test counts around it is the delegate's own.
// It keeps books: addresses it was given, what is alive, whether two threads were in one context at
// a time.
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <mutex>

#include "null/format.h"

using namespace null_qnn;
using namespace executorch_qnn::abi;

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

struct Loaded {
  std::unique_ptr<NullContext> content;
  std::atomic<bool> busy{false};
};

struct Graph {
  Loaded* context;
  NullGraph* graph;
};

struct Books {
  std::atomic<int> backends{0}, devices{0}, contexts{0}, loads{0}, executions{0}, collisions{0};
  // Of the last execution, in the order of the call.
  const void* inputs[256];
  const void* outputs[256];
} g_books;

Error create_one(std::atomic<int>& count, Handle* handle) {
  ++count;
  *handle = &count;
  return 0;
}

LogCallback g_log = nullptr;

void log_error(const char* format, ...) {
  if (g_log == nullptr) return;
  va_list args;
  va_start(args, format);
  g_log(format, LogLevel::kError, 0, args);
  va_end(args);
}

Error context_from_binary(Handle, Handle, const Config* const*, const void* binary, uint64_t size,
                          Handle* handle, Handle) {
  auto content = read_context(binary, size);
  if (content == nullptr) return 5000;
  auto* loaded = new Loaded;
  loaded->content = std::move(content);
  *handle = loaded;
  ++g_books.contexts;
  ++g_books.loads;
  return 0;
}

Error context_free(Handle handle, Handle) {
  delete static_cast<Loaded*>(handle);
  --g_books.contexts;
  return 0;
}

Error graph_retrieve(Handle context, const char* name, Handle* handle) {
  auto* loaded = static_cast<Loaded*>(context);
  for (NullGraph& graph : loaded->content->graphs) {
    if (graph.name != name) continue;
    // QNN's handles, too, live as long as their context; a leak of this size is a test's.
    static std::mutex mutex;
    static std::list<Graph> handles;
    std::lock_guard<std::mutex> lock(mutex);
    handles.push_back({loaded, &graph});
    *handle = &handles.back();
    return 0;
  }
  return 6000;
}

const Tensor* find(const Tensor* tensors, uint32_t count, uint32_t id) {
  for (uint32_t i = 0; i < count; ++i) {
    if (tensors[i].v1.id == id) return &tensors[i];
  }
  return nullptr;
}

void step(const NullGraph& graph, const Tensor* inputs, uint32_t n_in, const Tensor* outputs,
          uint32_t n_out) {
  for (size_t i = 0; i < graph.inputs.size() && i < graph.outputs.size(); ++i) {
    if (graph.inputs[i].bytes != graph.outputs[i].bytes) continue;
    const Tensor* in = find(inputs, n_in, graph.inputs[i].tensor.v1.id);
    const Tensor* out = find(outputs, n_out, graph.outputs[i].tensor.v1.id);
    auto* to = static_cast<uint8_t*>(out->v1.buffer.data);
    if (to != in->v1.buffer.data) std::memcpy(to, in->v1.buffer.data, graph.inputs[i].bytes);
    ++to[0];
  }
}

Error graph_execute(Handle handle, const Tensor* inputs, uint32_t n_in, Tensor* outputs,
                    uint32_t n_out, Handle, Handle) {
  const auto* graph = static_cast<const Graph*>(handle);
  if (graph->context->busy.exchange(true)) ++g_books.collisions;
  Error error = 0;
  const uint32_t behaviour = graph->graph->behaviour;
  if (n_in != graph->graph->inputs.size() || n_out != graph->graph->outputs.size()) {
    log_error("got %u inputs and %u outputs", n_in, n_out);
    error = 6004;
  } else if (behaviour == kFail) {
    log_error("the null graph fails as asked");
    error = 6031;
  }
  for (uint32_t i = 0; i < n_in && i < 256; ++i) g_books.inputs[i] = inputs[i].v1.buffer.data;
  for (uint32_t i = 0; i < n_out && i < 256; ++i) g_books.outputs[i] = outputs[i].v1.buffer.data;
  if (behaviour == kSleep) usleep(1000);
  if (error == 0 && behaviour >= kStep) step(*graph->graph, inputs, n_in, outputs, n_out);
  ++g_books.executions;
  graph->context->busy = false;
  return error;
}

Error get_message(Error, const char** message) {
  *message = "NULL_ERROR: as asked";
  return 0;
}

const Provider* provider() {
  static Provider instance = [] {
    Provider p{};
    p.backend_id = kBackendHtp;
    p.name = "HTP_NULL";
    p.version = {{2, 40, 0}, {5, 51, 0}};
    Interface& table = p.interface;
    table.log_create = [](LogCallback callback, LogLevel, Handle* log) -> Error {
      g_log = callback;
      *log = &g_log;
      return 0;
    };
    table.log_set_level = [](Handle, LogLevel) -> Error { return 0; };
    table.log_free = [](Handle) -> Error { return 0; };
    table.backend_create = [](Handle, const Config* const*, Handle* backend) {
      return create_one(g_books.backends, backend);
    };
    table.backend_free = [](Handle) -> Error {
      --g_books.backends;
      return 0;
    };
    table.backend_get_build_id = [](const char** id) -> Error {
      *id = "v2.null";
      return 0;
    };
    table.device_create = [](Handle, const Config* const*, Handle* device) {
      return create_one(g_books.devices, device);
    };
    table.device_free = [](Handle) -> Error {
      --g_books.devices;
      return 0;
    };
    table.context_create_from_binary = context_from_binary;
    table.context_free = context_free;
    table.graph_retrieve = graph_retrieve;
    table.graph_execute = graph_execute;
    table.error_get_message = get_message;
    return p;
  }();
  return &instance;
}

}  // namespace

EXPORT Error QnnInterface_getProviders(const Provider* const** providers, uint32_t* count) {
  static const Provider* const kList[] = {provider()};
  *providers = kList;
  *count = 1;
  return 0;
}

EXPORT const void* null_input(int index) { return g_books.inputs[index]; }
EXPORT const void* null_output(int index) { return g_books.outputs[index]; }
// What is alive or has happened: 0 backends, 1 devices, 2 contexts, 3 contexts ever loaded,
// 4 executions, 5 executions that found another one in their context.
EXPORT int null_count(int what) {
  const std::atomic<int>* counts[] = {&g_books.backends, &g_books.devices,    &g_books.contexts,
                                      &g_books.loads,    &g_books.executions, &g_books.collisions};
  return *counts[what];
}
