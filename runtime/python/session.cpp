// SPDX-License-Identifier: BSD-3-Clause
// The running half of the Python module; documented in _native.pyi. Nothing here knows torch:
// tensors come as addresses, which the caller keeps alive. Programs load and run with the GIL
// released.
#include "session/session.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "delegate/options.h"
#include "python/buffer.h"
#include "python/error.h"
#include "state/state_api.h"

namespace nb = nanobind;

namespace executorch_qnn {
namespace {

// ------------------------------------------------------------------------------------- values

const char* to_string(ValueKind kind) {
  switch (kind) {
    case ValueKind::kTensor:
      return "tensor";
    case ValueKind::kInt:
      return "int";
    case ValueKind::kDouble:
      return "float";
    case ValueKind::kBool:
      return "bool";
    case ValueKind::kNone:
      return "none";
    case ValueKind::kOther:
      break;
  }
  return "other";
}

nb::tuple to_python(const ValueInfo& value) {
  return nb::make_tuple(to_string(value.kind), value.type, nb::tuple(nb::cast(value.dims)));
}

nb::dict to_python(const MethodInfo& info) {
  nb::list inputs, outputs;
  for (const ValueInfo& value : info.inputs) inputs.append(to_python(value));
  for (const ValueInfo& value : info.outputs) outputs.append(to_python(value));
  nb::dict result;
  result["inputs"] = inputs;
  result["outputs"] = outputs;
  result["backends"] = info.backends;
  return result;
}

// (address, bytes, scalar type, shape), or a Python scalar.
InputValue to_input(nb::handle value) {
  if (value.is_none()) return std::monostate();
  if (nb::isinstance<nb::bool_>(value)) return nb::cast<bool>(value);  // before int: it is one
  if (nb::isinstance<nb::int_>(value)) return nb::cast<int64_t>(value);
  if (nb::isinstance<nb::float_>(value)) return nb::cast<double>(value);
  const auto parts = nb::cast<nb::tuple>(value);
  TensorView tensor;
  // An address is unknown to Python's type system: the caller vouches for it.
  tensor.data = reinterpret_cast<const void*>(nb::cast<uintptr_t>(parts[0]));
  tensor.bytes = nb::cast<size_t>(parts[1]);
  tensor.type = nb::cast<int8_t>(parts[2]);
  tensor.dims = nb::cast<std::vector<int32_t>>(parts[3]);
  return tensor;
}

// (address, bytes) for a tensor, None for anything else.
OutputValue to_output(nb::handle value) {
  OutputValue output;
  if (value.is_none()) return output;
  const auto parts = nb::cast<nb::tuple>(value);
  output.data = reinterpret_cast<void*>(nb::cast<uintptr_t>(parts[0]));
  output.capacity = nb::cast<size_t>(parts[1]);
  return output;
}

// (scalar type, shape) for a tensor, else the value.
nb::object to_python(const OutputValue& output, bool tensor) {
  if (tensor) return nb::make_tuple(output.type, nb::tuple(nb::cast(output.dims)));
  return std::visit(
      [](const auto& value) -> nb::object {
        if constexpr (std::is_same_v<std::decay_t<decltype(value)>, std::monostate>) {
          return nb::none();
        } else {
          return nb::cast(value);
        }
      },
      output.scalar);
}

nb::list run(Session& session, const std::string& method, const nb::sequence& inputs,
             const nb::sequence& outputs) {
  std::vector<InputValue> in;
  for (nb::handle value : inputs) in.push_back(to_input(value));
  std::vector<OutputValue> out;
  std::vector<bool> tensors;
  for (nb::handle value : outputs) {
    out.push_back(to_output(value));
    tensors.push_back(!value.is_none());
  }
  Status status;
  {
    nb::gil_scoped_release released;
    status = session.run(method, in, out);
  }
  unwrap(std::move(status));
  nb::list result;
  for (size_t i = 0; i < out.size(); ++i) result.append(to_python(out[i], tensors[i]));
  return result;
}

// ------------------------------------------------------------------------------------- state

uintptr_t address(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

nb::object to_python(const TensorEncoding& encoding) {
  if (!encoding.quantized) return nb::none();
  return nb::make_tuple(encoding.scale, encoding.offset);
}

nb::dict to_python(const StateDescriptor& d) {
  nb::dict result;
  result["fqn"] = d.name;
  result["shape"] = nb::tuple(nb::cast(d.dims));
  result["scalar_type"] = static_cast<int>(d.host_type);
  result["stored_dtype"] = static_cast<uint32_t>(d.stored_type);
  result["nbytes"] = d.stored_bytes();
  result["encoding"] = to_python(d.encoding);
  return result;
}

nb::dict to_python(const StateInfo& info) {
  nb::dict result = to_python(info.descriptor);
  result["binding"] = info.binding;
  result["address"] = address(info.address);
  result["input_address"] = address(info.input_address);
  result["output_address"] = address(info.output_address);
  return result;
}

nb::dict to_python(const StateFileInfo& info) {
  nb::list buffers;
  for (const StateDescriptor& buffer : info.buffers) buffers.append(to_python(buffer));
  nb::dict result;
  result["version"] = nb::make_tuple(info.major, info.minor);
  result["program_sha256"] = to_hex(info.program);
  result["nbytes"] = info.bytes;
  result["state"] = buffers;
  return result;
}

nb::bytes read_state(const Session& session, const std::string& name) {
  const StateDescriptor descriptor = unwrap(session.describe_state(name));
  const size_t size = descriptor.host_bytes();
  nb::bytes values =
      nb::steal<nb::bytes>(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size)));
  if (!values.is_valid()) throw nb::python_error();
  Status status;
  {
    // Nobody else has seen this object yet.
    void* to = PyBytes_AsString(values.ptr());
    nb::gil_scoped_release released;
    status = session.read_state(name, to, size);
  }
  unwrap(std::move(status));
  return values;
}

void write_state(Session& session, const std::string& name, nb::handle values) {
  const Buffer buffer(values);
  Status status;
  {
    nb::gil_scoped_release released;
    status = session.write_state(name, buffer.data(), buffer.size());
  }
  unwrap(std::move(status));
}

// Calls that may wait for a running execution, or work for long.
template <class Call>
auto without_gil(const Call& call) {
  nb::gil_scoped_release released;
  return call();
}

void configure(const std::string& libraries, const std::string& package_folder) {
  DelegateOptions options = delegate_options();
  options.libraries = libraries;
  options.package_folder = package_folder;
  set_delegate_options(options);
}

}  // namespace

void bind_session(nb::module_& module) {
  nb::class_<ProgramFile>(module, "Program")
      .def(
          nb::new_([](const std::filesystem::path& path, const std::string& libraries, bool mlock) {
            return std::const_pointer_cast<ProgramFile>(unwrap(
                without_gil([&] { return ProgramFile::open(path.string(), {libraries, mlock}); })));
          }),
          nb::arg("path"), nb::arg("qnn_folder") = "", nb::kw_only(), nb::arg("mlock") = false)
      .def_prop_ro("path", [](const ProgramFile& program) { return program.path(); })
      .def_prop_ro("methods", [](const ProgramFile& program) { return program.methods(); })
      .def(
          "method_meta",
          [](const ProgramFile& program, const std::string& name) {
            return to_python(unwrap(program.method(name)));
          },
          nb::arg("name"))
      .def(
          "named_data",
          [](const ProgramFile& program, const std::string& key) {
            const std::string data = unwrap(program.named_data(key));
            return nb::bytes(data.data(), data.size());
          },
          nb::arg("key"))
      .def_prop_ro("sha256", [](const ProgramFile& program) { return to_hex(program.digest()); });

  nb::class_<Session>(module, "Session")
      .def(nb::new_([](std::shared_ptr<ProgramFile> program) {
             return unwrap(without_gil([&] { return Session::create(std::move(program)); }));
           }),
           nb::arg("program"))
      .def("run", &run, nb::arg("method"), nb::arg("inputs"), nb::arg("outputs"))
      .def("state",
           [](const Session& session) {
             nb::list result;
             for (const StateInfo& info : without_gil([&] { return session.state(); })) {
               result.append(to_python(info));
             }
             return result;
           })
      .def("read_state", &read_state, nb::arg("fqn"))
      .def("write_state", &write_state, nb::arg("fqn"), nb::arg("values"))
      .def("reset_state",
           [](Session& session) { unwrap(without_gil([&] { return session.reset_state(); })); })
      .def(
          "save_state",
          [](const Session& session, const std::filesystem::path& path) {
            unwrap(without_gil([&] { return session.save_state(path.string()); }));
          },
          nb::arg("path"))
      .def(
          "load_state",
          [](Session& session, const std::filesystem::path& path) {
            unwrap(without_gil([&] { return session.load_state(path.string()); }));
          },
          nb::arg("path"))
      .def("fork",
           [](const Session& session) {
             return unwrap(without_gil([&] { return session.fork(); }));
           })
      .def_prop_ro("state_bytes_copied", [](const Session& session) {
        return without_gil([&] { return session.state_bytes_copied(); });
      });

  module.def(
      "inspect_state",
      [](const std::filesystem::path& path) {
        return to_python(unwrap(without_gil([&] { return inspect_state_file(path.string()); })));
      },
      nb::arg("path"));
  module.def("configure_delegate", &configure, nb::arg("qnn_folder") = "",
             nb::arg("package_folder") = "");
  module.def("registration_error", &etqnn_registration_error);
}

}  // namespace executorch_qnn
