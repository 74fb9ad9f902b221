// SPDX-License-Identifier: BSD-3-Clause
// The delegate's place in ExecuTorch's runtime.
#include <executorch/runtime/backend/interface.h>

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "core/api.h"
#include "delegate/context_cache.h"
#include "delegate/executor.h"
#include "delegate/failure.h"
#include "delegate/options.h"
#include "delegate/payload.h"
#include "delegate/store_registry.h"
#include "state/state_api.h"

namespace executorch_qnn {
namespace {

namespace et = executorch::runtime;

// A loaded delegate: the executor, and what says which store it uses.
struct Handle {
  std::unique_ptr<LoadRegistration> registration;  // null if the store came by token
  std::unique_ptr<Executor> executor;
};

// Named data of the program, kept mapped as long as somebody needs it.
Result<ContextBytes> named_data(const et::NamedDataMap* map, const std::string& key) {
  if (map == nullptr) return Status(ErrorKind::kInvalid, "the program has no named data");
  auto buffer = map->get_data(key);
  if (!buffer.ok()) {
    return Status(ErrorKind::kInvalid, "the program has no named data " + key + " (" +
                                           et::to_string(buffer.error()) + ")");
  }
  auto owner = std::make_shared<et::FreeableBuffer>(std::move(buffer.get()));
  return ContextBytes{owner, owner->data(), owner->size()};
}

Status check_compatible(const Payload& payload, const Library& library, uint32_t soc_model) {
  const abi::Version have = library.core_api();
  if (have.major != payload.core_major || have.minor < payload.core_minor) {
    return {ErrorKind::kIncompatible,
            "the program was compiled with QAIRT " + payload.build_id + " (core API " +
                std::to_string(payload.core_major) + "." + std::to_string(payload.core_minor) +
                "), and the library in " + library.folder() + " is " + library.build_id() + " (" +
                std::to_string(have.major) + "." + std::to_string(have.minor) +
                "): a context binary runs on the version that made it and on later ones; use "
                "newer QNN libraries, or lower the model with these"};
  }
  if (soc_model != 0 && soc_model != payload.soc_model) {
    return {ErrorKind::kIncompatible, "the program was compiled for " + payload.target + " (SoC " +
                                          std::to_string(payload.soc_model) +
                                          "), this device is SoC " + std::to_string(soc_model)};
  }
  return {};
}

// A string or int option of this load, or the default.
Result<std::string> text_spec(const et::BackendInitContext& context, const char* key) {
  const auto value = context.get_runtime_spec<const char*>(key);
  if (value.ok()) return std::string(value.get());
  if (value.error() == et::Error::NotFound) return std::string();
  return Status(ErrorKind::kInvalid, std::string("runtime spec ") + key + " must be a string");
}

Result<std::unique_ptr<Handle>> load(et::BackendInitContext& context, const void* blob,
                                     size_t size) {
  ETQNN_ASSIGN(const Payload payload, parse_payload(blob, size));
  const DelegateOptions options = delegate_options();
  ETQNN_ASSIGN(std::string folder, text_spec(context, kLibrariesOption));
  ETQNN_ASSIGN(const std::string token, text_spec(context, kStoreOption));
  const auto soc_spec = context.get_runtime_spec<int>(kSocOption);
  const uint32_t soc_model =
      soc_spec.ok() ? static_cast<uint32_t>(soc_spec.get()) : options.soc_model;

  auto handle = std::make_unique<Handle>();
  std::shared_ptr<StateStore> store;
  bool verified = false;
  if (!token.empty()) {
    ETQNN_ASSIGN(TokenTarget target, find_token(token));
    store = std::move(target.store);
    verified = target.verified;
    if (folder.empty()) folder = std::move(target.libraries);
  } else if (!payload.states.empty()) {
    const char* method = context.get_method_name();
    handle->registration = store_for({context.get_named_data_map(), context.get_runtime_allocator(),
                                      method == nullptr ? payload.method : method});
    store = handle->registration->store();
  }

  ETQNN_ASSIGN(folder, resolve_libraries(folder, options));
  ETQNN_ASSIGN(const std::shared_ptr<const Library> library, Library::load(folder));
  ETQNN_TRY(check_compatible(payload, *library, soc_model));
  const et::NamedDataMap* data = context.get_named_data_map();
  const auto binary = [&]() -> Result<ContextBytes> {
    ETQNN_ASSIGN(ContextBytes bytes, named_data(data, payload.context_key));
    if (bytes.size != payload.context_size) {
      return Status(ErrorKind::kInvalid, "the context binary has " + std::to_string(bytes.size) +
                                             " bytes, its payload states " +
                                             std::to_string(payload.context_size));
    }
    bytes.verified = verified;
    return bytes;
  };
  ETQNN_ASSIGN(
      const std::shared_ptr<const ExecutableContext> qnn,
      cached_context(library, {folder, payload.context_digest, payload.soc_model}, binary));
  ETQNN_ASSIGN(std::shared_ptr<const ExecutableGraph> graph, qnn->graph(payload.graph));

  std::vector<StateSlot*> slots;
  for (const PayloadState& state : payload.states) {
    InitialValue initial;
    if (!state.initial_key.empty()) {
      ETQNN_ASSIGN(ContextBytes bytes, named_data(data, state.initial_key));
      if (bytes.size != state.descriptor.stored_bytes()) {
        return Status(ErrorKind::kInvalid, "the initial value of " + state.descriptor.describe() +
                                               " has " + std::to_string(bytes.size) + " bytes");
      }
      initial = {std::move(bytes.owner), bytes.data};
    }
    ETQNN_ASSIGN(StateSlot * slot, store->bind(state.descriptor, state.binding, initial));
    slots.push_back(slot);
  }
  ETQNN_ASSIGN(handle->executor,
               Executor::create(payload, std::move(graph), std::move(store), slots));
  return handle;
}

class QnnDelegate final : public et::BackendInterface {
 public:
  // Whether there are QNN libraries is only known once a program asks for them, from where it says.
  bool is_available() const override { return true; }

  et::Result<et::DelegateHandle*> init(et::BackendInitContext& context,
                                       et::FreeableBuffer* processed,
                                       et::ArrayRef<et::CompileSpec>) const override {
    auto handle = load(context, processed->data(), processed->size());
    if (!handle.ok()) return fail(handle.status(), et::Error::InvalidProgram);
    processed->Free();
    return static_cast<et::DelegateHandle*>(std::move(handle).value().release());
  }

  et::Error execute(et::BackendExecutionContext&, et::DelegateHandle* handle,
                    et::Span<et::EValue*> args) const override {
    const Status status = static_cast<Handle*>(handle)->executor->execute(args);
    return status.ok() ? et::Error::Ok : fail(status, et::Error::InvalidArgument);
  }

  void destroy(et::DelegateHandle* handle) const override { delete static_cast<Handle*>(handle); }

  et::Error set_option(et::BackendOptionContext&,
                       const et::Span<et::BackendOption>& given) override {
    DelegateOptions options = delegate_options();
    for (const et::BackendOption& option : given) {
      const std::string key(option.key, strnlen(option.key, sizeof option.key));
      const auto* text = std::get_if<std::array<char, et::kMaxOptionValueLength>>(&option.value);
      const int* number = std::get_if<int>(&option.value);
      if (key == kLibrariesOption && text != nullptr) {
        options.libraries.assign(text->data(), strnlen(text->data(), text->size()));
      } else if (key == kSocOption && number != nullptr) {
        options.soc_model = static_cast<uint32_t>(*number);
      } else {
        return fail({ErrorKind::kInvalid, "there is no option " + key + " of that type"},
                    et::Error::InvalidArgument);
      }
    }
    set_delegate_options(options);
    return et::Error::Ok;
  }
};

QnnDelegate& delegate() {
  static auto* instance = new QnnDelegate();  // outlives methods destroyed at exit
  return *instance;
}

const et::Error g_registered = et::register_backend({kBackendId, &delegate()});

}  // namespace
}  // namespace executorch_qnn

int etqnn_registration_error() { return static_cast<int>(executorch_qnn::g_registered); }
