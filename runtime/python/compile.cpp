// SPDX-License-Identifier: BSD-3-Clause
// The compiling half of the Python module. What each function takes and returns is documented in
// _native.pyi. QNN is only called with the GIL released.
#include <nanobind/nanobind.h>
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/file.h"
#include "core/stdout_capture.h"
#include "graph/builder.h"
#include "graph/context.h"
#include "graph/inspect.h"
#include "python/buffer.h"
#include "python/error.h"
#include "qnn/discovery.h"

namespace nb = nanobind;

namespace executorch_qnn {
namespace {

[[noreturn]] void invalid(const std::string& message) {
  throw NativeError(Status(ErrorKind::kInvalid, message));
}

nb::tuple to_python(const abi::Version& version) {
  return nb::make_tuple(version.major, version.minor, version.patch);
}

// ------------------------------------------------------------------------------------- encodings

Encoding parse_encoding(const nb::object& object) {
  if (object.is_none()) return {};
  auto items = nb::cast<nb::tuple>(object);
  if (items.size() == 2 && !nb::isinstance<nb::str>(items[0])) {
    return Encoding::scale_offset(nb::cast<float>(items[0]), nb::cast<int32_t>(items[1]));
  }
  Encoding encoding;
  auto kind = nb::cast<std::string>(items[0]);
  auto expect = [&](size_t count) {
    if (items.size() != count + 1)
      invalid("encoding " + kind + " takes " + std::to_string(count) + " values");
  };
  auto offsets = [&](const nb::handle& given) {
    encoding.offsets = given.is_none() ? std::vector<int32_t>(encoding.scales.size(), 0)
                                       : nb::cast<std::vector<int32_t>>(given);
  };
  if (kind == "axis") {
    expect(3);
    encoding.kind = abi::EncodingKind::kAxisScaleOffset;
    encoding.axis = nb::cast<int32_t>(items[1]);
    encoding.scales = nb::cast<std::vector<float>>(items[2]);
    offsets(items[3]);
  } else if (kind == "bits") {
    expect(3);
    encoding.kind = abi::EncodingKind::kBitWidthScaleOffset;
    encoding.bits = nb::cast<uint32_t>(items[1]);
    encoding.scales = {nb::cast<float>(items[2])};
    encoding.offsets = {nb::cast<int32_t>(items[3])};
  } else if (kind == "bits_axis") {
    expect(4);
    encoding.kind = abi::EncodingKind::kBitWidthAxisScaleOffset;
    encoding.bits = nb::cast<uint32_t>(items[1]);
    encoding.axis = nb::cast<int32_t>(items[2]);
    encoding.scales = nb::cast<std::vector<float>>(items[3]);
    offsets(items[4]);
  } else if (kind == "blockwise") {
    expect(5);
    encoding.kind = abi::EncodingKind::kBlockwiseExpansion;
    encoding.bits = nb::cast<uint32_t>(items[1]);
    encoding.axis = nb::cast<int32_t>(items[2]);
    encoding.scales = nb::cast<std::vector<float>>(items[3]);
    offsets(nb::none());
    encoding.blocks_per_axis = nb::cast<uint32_t>(items[4]);
    Buffer factors(items[5]);
    const auto* bytes = static_cast<const uint8_t*>(factors.data());
    encoding.block_scales.assign(bytes, bytes + factors.size());
  } else {
    invalid("unknown encoding " + kind);
  }
  return encoding;
}

nb::object to_python(const Encoding& encoding) {
  switch (encoding.kind) {
    case abi::EncodingKind::kScaleOffset:
      return nb::make_tuple(encoding.scales[0], encoding.offsets[0]);
    case abi::EncodingKind::kAxisScaleOffset:
      return nb::make_tuple("axis", encoding.axis, encoding.scales, encoding.offsets);
    case abi::EncodingKind::kBitWidthScaleOffset:
      return nb::make_tuple("bits", encoding.bits, encoding.scales[0], encoding.offsets[0]);
    case abi::EncodingKind::kBitWidthAxisScaleOffset:
      return nb::make_tuple("bits_axis", encoding.bits, encoding.axis, encoding.scales,
                            encoding.offsets);
    default:
      return nb::none();
  }
}

// ------------------------------------------------------------------------------------- tensors,
// nodes

TensorSpec make_spec(std::string name, uint32_t kind, uint32_t dtype, std::vector<uint32_t> shape,
                     const nb::object& encoding) {
  TensorSpec spec;
  spec.name = std::move(name);
  spec.kind = static_cast<abi::TensorKind>(kind);
  spec.dtype = static_cast<abi::DataType>(dtype);
  spec.dims = std::move(shape);
  spec.encoding = parse_encoding(encoding);
  return spec;
}

ScalarParam parse_scalar(const nb::handle& dtype, const nb::handle& value) {
  ScalarParam param;
  param.dtype = static_cast<abi::DataType>(nb::cast<uint32_t>(dtype));
  if (nb::isinstance<nb::float_>(value)) {
    param.value = nb::cast<double>(value);
  } else {
    param.value = nb::cast<int64_t>(nb::int_(nb::borrow(value)));
  }
  return param;
}

// Parameters as Graph.add_node takes them; `tensor` turns the third item of a tensor parameter into
// an index.
template <class ToIndex>
std::vector<NodeSpec::Param> parse_params(const nb::sequence& params, ToIndex to_index) {
  std::vector<NodeSpec::Param> result;
  for (nb::handle item : params) {
    auto param = nb::cast<nb::tuple>(item);
    auto name = nb::cast<std::string>(param[0]);
    auto kind = nb::cast<std::string>(param[1]);
    if (kind == "scalar" && param.size() == 4) {
      result.push_back({std::move(name), parse_scalar(param[2], param[3])});
    } else if (kind == "tensor" && param.size() == 3) {
      result.push_back({std::move(name), to_index(param[2])});
    } else {
      invalid("parameter " + name +
              " is neither (name, 'scalar', dtype, value) nor (name, 'tensor', tensor)");
    }
  }
  return result;
}

// An op with tensors of its own, for validation.
class DetachedNode {
 public:
  explicit DetachedNode(const nb::tuple& node) {
    if (node.size() != 5) invalid("a node is (name, type, inputs, outputs, params)");
    auto add = [this](const nb::handle& tensor) { return add_tensor(nb::cast<nb::tuple>(tensor)); };
    spec_.name = nb::cast<std::string>(node[0]);
    spec_.type = nb::cast<std::string>(node[1]);
    for (nb::handle tensor : node[2]) spec_.inputs.push_back(add(tensor));
    for (nb::handle tensor : node[3]) spec_.outputs.push_back(add(tensor));
    spec_.params = parse_params(nb::cast<nb::sequence>(node[4]), add);
  }

  Status validate(const Backend& backend) const {
    nb::gil_scoped_release unlocked;
    return validate_op(backend, tensors_, data_, spec_);
  }

 private:
  uint32_t add_tensor(const nb::tuple& tensor) {
    if (tensor.size() != 6) invalid("a tensor is (name, kind, dtype, shape, encoding, data)");
    TensorSpec& spec = tensors_.emplace_back(
        make_spec(nb::cast<std::string>(tensor[0]), nb::cast<uint32_t>(tensor[1]),
                  nb::cast<uint32_t>(tensor[2]), nb::cast<std::vector<uint32_t>>(tensor[3]),
                  nb::borrow(tensor[4])));
    const void* data = nullptr;
    if (!tensor[5].is_none()) {
      const Buffer& buffer = buffers_.emplace_back(tensor[5]);
      if (buffer.size() != spec.bytes())
        invalid("data of tensor " + spec.name + " has the wrong size");
      data = buffer.data();
    }
    data_.push_back(data);
    return static_cast<uint32_t>(tensors_.size() - 1);
  }

  NodeSpec spec_;
  std::vector<TensorSpec> tensors_;
  std::vector<const void*> data_;
  std::vector<Buffer> buffers_;
};

// ------------------------------------------------------------------------------------- options

template <class Apply>
void for_each_option(const nb::dict& options, Apply apply) {
  for (auto [key, value] : options) {
    auto name = nb::cast<std::string>(key);
    if (!apply(name, value)) invalid("unknown option " + name);
  }
}

GraphOptions parse_graph_options(const nb::dict& options) {
  GraphOptions result;
  for_each_option(options, [&result](const std::string& name, const nb::handle& value) {
    if (name == "precision") {
      auto precision = nb::cast<std::string>(value);
      if (precision != "float16" && precision != "default")
        invalid("unknown precision " + precision);
      result.float16 = precision == "float16";
    } else if (name == "vtcm_mb") {
      result.vtcm_megabytes = nb::cast<uint32_t>(value);
    } else if (name == "optimization_level") {
      result.optimization_level = nb::cast<uint32_t>(value);
    } else if (name == "hvx_threads") {
      result.hvx_threads = nb::cast<uint32_t>(value);
    } else if (name == "share_io") {
      result.share_io = nb::cast<bool>(value);
    } else {
      return false;
    }
    return true;
  });
  return result;
}

ContextOptions parse_context_options(const nb::dict& options) {
  ContextOptions result;
  for_each_option(options, [&result](const std::string& name, const nb::handle& value) {
    if (name != "share_weights") return false;
    result.share_weights = nb::cast<bool>(value);
    return true;
  });
  return result;
}

// ------------------------------------------------------------------------------------- results

nb::dict to_python(const FinalizeReport& report) {
  nb::dict ddr;
  ddr["read"] = report.ddr.read;
  ddr["write"] = report.ddr.write;
  ddr["spill"] = report.ddr.spill;
  ddr["fill"] = report.ddr.fill;
  nb::dict result;
  result["log"] =
      nb::bytes(report.log.data(), report.log.size()).attr("decode")("utf-8", "replace");
  result["ddr"] = ddr;
  result["seconds"] = report.seconds;
  return result;
}

nb::list to_python(const std::vector<TensorSpec>& tensors) {
  nb::list result;
  for (const TensorSpec& spec : tensors) {
    nb::dict tensor;
    tensor["name"] = spec.name;
    tensor["id"] = spec.id;
    tensor["dtype"] = static_cast<uint32_t>(spec.dtype);
    tensor["shape"] = nb::tuple(nb::cast(spec.dims));
    tensor["encoding"] = to_python(spec.encoding);
    result.append(tensor);
  }
  return result;
}

nb::dict to_python(const ContextDescription& context) {
  nb::list graphs;
  for (const GraphDescription& graph : context.graphs) {
    nb::dict entry;
    entry["name"] = graph.name;
    entry["inputs"] = to_python(graph.inputs);
    entry["outputs"] = to_python(graph.outputs);
    entry["spill_fill_bytes"] = graph.spill_fill_bytes;
    entry["vtcm_bytes"] = graph.vtcm_bytes;
    entry["optimization_level"] = graph.optimization_level;
    entry["hvx_threads"] = graph.hvx_threads;
    entry["io_bytes"] = graph.io_bytes;
    entry["op_bytes"] = graph.op_bytes;
    entry["const_bytes"] = graph.const_bytes;
    entry["ddr_bytes"] = graph.ddr_bytes;
    entry["shared_weight_bytes"] = graph.shared_weight_bytes;
    entry["safe_share_io"] = graph.safe_share_io;
    graphs.append(entry);
  }
  nb::dict result;
  result["build_id"] = context.build_id;
  result["core_api"] = to_python(context.core_api);
  result["backend_api"] = to_python(context.backend_api);
  result["blob_version"] = to_python(context.blob_version);
  result["soc_model"] = context.soc_model;
  result["htp_arch"] = context.dsp_arch;
  result["graphs"] = graphs;
  return result;
}

// Runs a graph of a loaded context once, on inputs by name.
nb::dict execute(const ExecutableContext& context, const std::string& name,
                 const nb::dict& inputs) {
  auto graph = unwrap(context.graph(name));
  std::vector<Buffer> buffers;
  std::vector<abi::Tensor> in, out;
  buffers.reserve(graph->inputs().size());
  for (const TensorSpec& spec : graph->inputs()) {
    if (!inputs.contains(spec.name.c_str())) invalid("input " + spec.name + " is missing");
    const Buffer& buffer = buffers.emplace_back(inputs[spec.name.c_str()]);
    if (buffer.size() != spec.bytes()) invalid("input " + spec.name + " has the wrong size");
    in.push_back(ExecutableGraph::bind(spec, const_cast<void*>(buffer.data())));
  }
  nb::dict outputs;
  for (const TensorSpec& spec : graph->outputs()) {
    auto bytes = nb::steal<nb::bytes>(
        PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(spec.bytes())));
    out.push_back(ExecutableGraph::bind(spec, PyBytes_AsString(bytes.ptr())));
    outputs[spec.name.c_str()] = bytes;
  }
  {
    nb::gil_scoped_release release;
    std::scoped_lock lock(context.execution_mutex());
    unwrap(graph->execute(in.data(), in.size(), out.data(), out.size()));
  }
  return outputs;
}

// Calls a function of the core without the GIL.
template <class Function>
auto unlocked(Function function) {
  nb::gil_scoped_release release;
  return function();
}

}  // namespace

void bind_compile(nb::module_& module) {
  using nb::literals::operator""_a;

  module.def(
      "find_library",
      [](const std::optional<std::string>& path, const std::vector<std::string>& extra) {
        std::vector<std::pair<std::string, std::string>> found;
        for (LibraryCandidate& candidate : find_library(path.value_or(""), extra).found) {
          found.emplace_back(std::move(candidate.how), std::move(candidate.folder));
        }
        return found;
      },
      "path"_a = nb::none(), "extra"_a = nb::list());
  module.def(
      "locate_library",
      [](const std::optional<std::string>& path, const std::vector<std::string>& extra) {
        LibraryCandidate best = unwrap(find_library(path.value_or(""), extra).best());
        return std::make_pair(std::move(best.how), std::move(best.folder));
      },
      "path"_a = nb::none(), "extra"_a = nb::list());

  nb::class_<Library>(module, "Library")
      .def(nb::new_([](const std::string& folder) {
             return std::const_pointer_cast<Library>(
                 unlocked([&] { return unwrap(Library::load(folder)); }));
           }),
           "folder"_a)
      .def_prop_ro("folder", &Library::folder)
      .def_prop_ro("build_id", &Library::build_id)
      .def_prop_ro("provider", &Library::provider)
      .def_prop_ro("core_api", [](const Library& self) { return to_python(self.core_api()); })
      .def_prop_ro("backend_api", [](const Library& self) { return to_python(self.backend_api()); })
      .def_prop_ro("system_api", [](const Library& self) -> nb::object {
        if (self.system() == nullptr) return nb::none();
        return to_python(self.system_api());
      });

  nb::class_<Backend>(module, "Backend")
      .def(nb::new_([](std::shared_ptr<Library> library, uint32_t soc_model, uint32_t log_level) {
             return std::const_pointer_cast<Backend>(unlocked([&] {
               return unwrap(Backend::create(std::move(library), soc_model,
                                             static_cast<abi::LogLevel>(log_level)));
             }));
           }),
           "library"_a, "soc_model"_a, "log_level"_a = 1)
      .def_prop_ro("soc_model", &Backend::soc_model)
      .def(
          "validate",
          [](const Backend& self, const nb::tuple& node) -> std::optional<std::string> {
            Status status = DetachedNode(node).validate(self);
            if (status.kind() == ErrorKind::kInvalid) unwrap(status);
            if (status.ok()) return std::nullopt;
            return status.message();
          },
          "node"_a);

  nb::class_<ContextBuilder>(module, "Context")
      .def(nb::new_([](std::shared_ptr<Backend> backend, const nb::dict& options) {
             ContextOptions parsed = parse_context_options(options);
             return unlocked(
                 [&] { return unwrap(ContextBuilder::create(std::move(backend), parsed)); });
           }),
           "backend"_a, "options"_a = nb::dict())
      .def(
          "graph",
          [](ContextBuilder& self, const std::string& name, const nb::dict& options) {
            GraphOptions parsed = parse_graph_options(options);
            return unlocked([&] { return unwrap(self.create_graph(name, parsed)); });
          },
          "name"_a, "options"_a = nb::dict())
      .def(
          "write_binary",
          [](ContextBuilder& self, const std::filesystem::path& path) {
            return unlocked([&] { return unwrap(self.write_binary(path.string())); });
          },
          "path"_a)
      .def("binary", [](ContextBuilder& self) {
        std::vector<uint8_t> bytes = unlocked([&] { return unwrap(self.binary()); });
        return nb::bytes(bytes.data(), bytes.size());
      });

  nb::class_<GraphBuilder>(module, "Graph")
      .def_prop_ro("name", &GraphBuilder::name)
      .def(
          "add_tensor",
          [](GraphBuilder& self, std::string name, uint32_t kind, uint32_t dtype,
             std::vector<uint32_t> shape, const nb::object& encoding, const nb::object& data) {
            TensorSpec spec = make_spec(std::move(name), kind, dtype, std::move(shape), encoding);
            std::optional<Buffer> buffer;
            if (!data.is_none()) buffer.emplace(data);
            const void* bytes = buffer ? buffer->data() : nullptr;
            uint64_t size = buffer ? buffer->size() : 0;
            return unlocked([&] { return unwrap(self.add_tensor(std::move(spec), bytes, size)); });
          },
          "name"_a, "kind"_a, "dtype"_a, "shape"_a, "encoding"_a = nb::none(),
          "data"_a = nb::none())
      .def(
          "add_node",
          [](GraphBuilder& self, std::string name, std::string type, std::vector<uint32_t> inputs,
             std::vector<uint32_t> outputs, const nb::sequence& params) {
            NodeSpec node;
            node.name = std::move(name);
            node.type = std::move(type);
            node.inputs = std::move(inputs);
            node.outputs = std::move(outputs);
            node.params = parse_params(
                params, [](const nb::handle& index) { return nb::cast<uint32_t>(index); });
            unlocked([&] { unwrap(self.add_node(node)); });
          },
          "name"_a, "type"_a, "inputs"_a, "outputs"_a, "params"_a = nb::list())
      .def("finalize", [](GraphBuilder& self) {
        return to_python(unlocked([&] { return unwrap(self.finalize()); }));
      });

  nb::class_<ExecutableContext>(module, "LoadedContext")
      .def(nb::new_([](std::shared_ptr<Backend> backend, const nb::object& binary) {
             Buffer buffer(binary);
             return unlocked([&] {
               return unwrap(
                   ExecutableContext::load(std::move(backend), buffer.data(), buffer.size()));
             });
           }),
           "backend"_a, "binary"_a)
      .def("execute", &execute, "graph"_a, "inputs"_a);

  module.def(
      "inspect_context",
      [](const Library& library, const nb::object& source) {
        if (std::filesystem::path path; !PyObject_CheckBuffer(source.ptr())) {
          path = nb::cast<std::filesystem::path>(source);
          return to_python(unlocked([&] {
            MappedFile file = unwrap(MappedFile::open(path.string()));
            return unwrap(inspect_context(library, file.data(), file.size()));
          }));
        }
        Buffer buffer(source);
        return to_python(unlocked(
            [&] { return unwrap(inspect_context(library, buffer.data(), buffer.size())); }));
      },
      "library"_a, "source"_a);

  module.def(
      "log_to",
      [](const std::optional<std::string>& path) {
        if (!set_diagnostics_file(path.value_or(""))) {
          throw NativeError(Status(ErrorKind::kIo, "cannot open " + *path));
        }
      },
      "path"_a.none());
}

}  // namespace executorch_qnn
