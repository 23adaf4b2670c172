// The Python module qcoll._C.
#include <pybind11/chrono.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdlib>
#include <cstring>

#include "backend.h"
#include "codec_ops.h"
#include "codec_timing.h"
#include "delegate_sockets.h"
#include "options.h"
#include "qcoll/base/error.h"
#include "qcoll/codec/codec.h"
#include "qcoll/transport/roll_call.h"
#include "qcoll/transport/socket.h"
#include "thread_policy.h"
#include "torch_store.h"
#include "version.h"

namespace py = pybind11;
using namespace qcoll;
using namespace qcoll::torch_binding;

namespace {

using Release = py::call_guard<py::gil_scoped_release>;

// Texts may hold bytes of the environment or of a peer.
py::object text_from(const char* bytes) {
  return py::reinterpret_steal<py::object>(
      PyUnicode_DecodeUTF8(bytes, static_cast<Py_ssize_t>(std::strlen(bytes)), "backslashreplace"));
}

void register_errors(py::module_& m) {
  static PyObject* transport_error = nullptr;
  const py::object base = py::module_::import("torch.distributed").attr("DistBackendError");
  transport_error =
      PyErr_NewExceptionWithDoc("qcoll.TransportError",
                                "A peer died, was late, disagreed, or the group was aborted.\n\n"
                                "`peer` is the rank to blame, or -1. The group cannot be used any "
                                "more.",
                                base.ptr(), nullptr);
  m.attr("TransportError") = py::handle(transport_error);
  // Global, for torch's own functions rethrow our errors too (Work.wait, Future.wait).
  py::register_exception_translator([](std::exception_ptr raised) {
    try {
      if (raised) std::rethrow_exception(raised);
    } catch (const UsageError& error) {
      PyErr_SetObject(PyExc_ValueError, text_from(error.what()).ptr());
    } catch (const TransportError& error) {
      py::object value = py::handle(transport_error)(text_from(error.what()));
      value.attr("peer") = error.peer();
      PyErr_SetObject(transport_error, value.ptr());
    }
  });
}

void register_options(py::module_& m) {
  py::class_<BackendOptions, Pointer<BackendOptions>, c10d::Backend::Options>(m, "Options")
      .def(py::init([] { return c10::make_intrusive<BackendOptions>(); }))
      .def("set", &BackendOptions::set, py::arg("key"), py::arg("value"))
      .def("copy", [](const BackendOptions& o) { return c10::make_intrusive<BackendOptions>(o); })
      .def(
          "__deepcopy__",
          [](const BackendOptions& o, const py::dict&) {
            return c10::make_intrusive<BackendOptions>(o);
          },
          py::arg("memo"))
      .def_readonly("given", &BackendOptions::given)
      .def_readwrite("_timeout", &BackendOptions::timeout);

  py::class_<comm::ThreadPolicy>(m, "ThreadPolicy")
      .def("with_exact",
           [](comm::ThreadPolicy policy) {
             policy.exact = true;
             return policy;
           })
      .def("with_settings",
           [](comm::ThreadPolicy policy, const std::map<std::string, std::string>& settings) {
             comm::Settings stronger;
             for (const auto& [key, value] : settings) {
               if (comm::Settings::belongs_to_a_group(key))
                 throw UsageError("qcoll option " + key + "=\"" + value +
                                  "\" is for a whole group, whose ranks compare it when it is "
                                  "formed; pass it to qcoll.Options or set it in the environment");
               stronger.set(key, value);
             }
             policy.settings.overlay(stronger);
             return policy;
           })
      .def_static("current", &thread_policy)
      .def("apply", &set_thread_policy);
}

py::dict to_dict(const comm::CollectiveStats& s) {
  py::dict bytes;
  bytes["within_node"] = s.within_node_bytes;
  bytes["across_nodes"] = s.across_nodes_bytes;
  py::dict d;
  d["calls"] = s.calls;
  d["payload_bytes"] = s.payload_bytes;
  d["wire_bytes"] = bytes;
  d["fallbacks"] = py::cast(s.exact_calls);
  d["nonfinite_blocks"] = s.nonfinite_blocks;
  d["encode_seconds"] = s.encode_seconds;
  d["decode_seconds"] = s.decode_seconds;
  d["wait_seconds"] = s.wait_seconds;
  return d;
}

py::object to_dict(const comm::Prediction& predicted) {
  if (!predicted.exact && !predicted.coded) return py::none();
  const auto micros = [](const std::optional<double>& seconds) {
    return seconds ? py::object(py::float_(*seconds * 1e6)) : py::none();
  };
  py::dict d;
  d["exact"] = micros(predicted.exact);
  d["coded"] = micros(predicted.coded);
  return d;
}

py::dict to_dict(const comm::Plan& plan) {
  py::list hops;
  for (const auto& hop : plan.hops) {
    py::dict h;
    h["level"] = hop.level;
    h["codec"] = hop.codec;
    h["ranks"] = hop.ranks;
    hops.append(h);
  }
  py::dict bytes;
  bytes["within_node"] = plan.within_node_bytes;
  bytes["across_nodes"] = plan.across_nodes_bytes;
  py::dict d;
  d["algorithm"] = plan.algorithm;
  d["topology"] = plan.topology;
  d["hops"] = hops;
  d["exact_because"] = plan.exact_because;
  d["payload_bytes"] = plan.payload_bytes;
  d["wire_bytes"] = bytes;
  d["node_across_nodes_bytes"] = plan.node_across_nodes_bytes;
  d["chunk_elements"] = plan.chunk_elements;
  d["slots"] = plan.slots;
  d["predicted_us"] = to_dict(plan.predicted);
  d["not_in_shared_memory"] = py::cast(plan.not_in_shared_memory);
  return d;
}

py::list to_list(const std::vector<transport::OperationLog::Entry>& entries) {
  using Stage = transport::OperationLog::Stage;
  const auto seconds = [](Clock::time_point t) { return comm::unix_seconds(t); };
  py::list operations;
  for (const auto& entry : entries) {
    const bool begun = entry.stage != Stage::kQueued;
    const bool ended = entry.stage == Stage::kFinished || entry.stage == Stage::kFailed;
    py::dict d;
    d["number"] = entry.sequence;
    d["call"] = entry.text;
    d["state"] = comm::name_of(entry.stage);
    d["queued"] = seconds(entry.queued);
    d["started"] = begun ? py::object(py::float_(seconds(entry.started))) : py::none();
    d["ended"] = ended ? py::object(py::float_(seconds(entry.ended))) : py::none();
    operations.append(d);
  }
  return operations;
}

py::dict to_dict(const comm::FlightRecord& record) {
  py::dict d;
  d["rank"] = record.rank;
  d["size"] = record.size;
  d["label"] = record.label;
  d["topology"] = record.topology;
  d["failure"] = record.failure;
  d["waits_for"] = record.waits_for;
  d["operations"] = to_list(record.operations);
  d["messages"] = to_list(record.messages);
  return d;
}

py::dict describe_group(Backend& backend) {
  comm::Group& group = backend.group();
  py::dict reasons;
  for (const Rank peer : group.topology().node_ranks())
    if (peer != group.topology().rank() && !group.mesh().mapped(peer))
      reasons[py::int_(peer)] = group.mesh().not_mapped_because(peer);
  py::dict d;
  d["topology"] = group.topology().describe();
  d["layout"] = comm::layout_of(group.topology());
  d["nodes"] = py::cast(group.topology().nodes());
  d["node"] = group.topology().node();
  d["options"] = group.options().to_string();
  d["not_in_shared_memory"] = reasons;
  d["encryption"] = backend.encryption();
  return d;
}

void register_backend(py::module_& m) {
  py::class_<Backend, Pointer<Backend>, c10d::Backend>(m, "Backend")
      .def(py::init<const Pointer<c10d::Store>&, int, int, const Pointer<BackendOptions>&>(),
           py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("options"))
      .def_property_readonly("may_delegate", &Backend::may_delegate)
      .def("meet", &Backend::meet, Release())
      .def("set_delegate", &Backend::set_delegate, py::arg("delegate"), py::arg("ports"), Release())
      .def("fail_without_delegate", &Backend::fail_without_delegate, py::arg("reason"), Release())
      .def_property_readonly("options", &Backend::getBackendOptions)
      .def("get_error", &Backend::getError)
      .def("_set_default_timeout", &Backend::setTimeout, py::arg("timeout"))
      .def("all_gather_with", &Backend::all_gather_with, py::arg("output"), py::arg("input"),
           py::arg("codec"), py::arg("async_op"), Release())
      .def("reduce_scatter_with", &Backend::reduce_scatter_with, py::arg("output"),
           py::arg("input"), py::arg("op"), py::arg("codec"), py::arg("async_op"), Release())
      .def("all_reduce_with", &Backend::all_reduce_with, py::arg("tensor"), py::arg("op"),
           py::arg("codec"), py::arg("async_op"), Release())
      .def("all_to_all_with", &Backend::all_to_all_with, py::arg("output"), py::arg("input"),
           py::arg("output_splits"), py::arg("input_splits"), py::arg("codec"), py::arg("async_op"),
           Release())
      .def(
          "explain",
          [](const Backend& backend, const std::string& verb, std::size_t numel,
             const py::object& dtype, const c10d::ReduceOp& op, const Backend::Codec& codec) {
            TORCH_CHECK_TYPE(THPDtype_Check(dtype.ptr()),
                             "qcoll.explain: dtype must be a torch.dtype");
            const auto type = reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
            return to_dict(backend.explain(verb, numel, type, op, codec));
          },
          py::arg("verb"), py::arg("numel"), py::arg("dtype"), py::arg("op"), py::arg("codec"))
      .def("stats",
           [](Backend& backend) {
             py::dict all;
             for (const auto& [verb, stats] : backend.group().stats().snapshot())
               all[py::str(verb)] = to_dict(stats);
             return all;
           })
      .def("reset_stats", [](Backend& backend) { backend.group().stats().reset(); })
      .def("flight_record",
           [](Backend& backend) { return to_dict(backend.group().flight_record()); })
      .def_property_readonly("group_number",
                             [](Backend& backend) { return backend.group().mesh().group(); })
      .def("describe", &describe_group);
  m.def("listening_ports", &listening_ports);
  m.def("local_addresses", [] {
    const char* interfaces = std::getenv("QCOLL_SOCKET_IFNAME");
    std::vector<std::string> texts;
    for (const auto& address : transport::local_addresses(interfaces ? interfaces : ""))
      texts.push_back(address.text());
    return texts;
  });
  m.def("shutdown_all", &Backend::shutdown_all, py::arg("grace"));
  m.def(
      "refuse_to_join",
      [](const Pointer<c10d::Store>& store, int rank, const std::string& reason) {
        TorchStore rendezvous(store);
        transport::refuse_to_join(rendezvous, rank, false, reason);
      },
      py::arg("store"), py::arg("rank"), py::arg("reason"), Release());
}

void register_codec_timer(py::module_& m) {
  const auto row = py::arg("row");
  const auto codec = py::arg("codec");
  const auto repeats = py::arg("repeats");
  py::class_<CodecTimer>(m, "CodecTimer")
      .def(py::init<at::Tensor, at::Tensor>(), py::arg("source"), py::arg("output"))
      .def("copy", &CodecTimer::copy, repeats, Release())
      .def("add", &CodecTimer::add, repeats, Release())
      .def("encode", &CodecTimer::encode, row, codec, repeats, Release())
      .def("decode", &CodecTimer::decode, row, codec, repeats, Release())
      .def("decode_add", &CodecTimer::decode_add, row, codec, repeats, Release())
      .def("requantize", &CodecTimer::requantize, row, codec, repeats, Release());
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  py::module_::import("torch.distributed");  // its types are bases of ours
  m.attr("__version__") = QCOLL_VERSION;
  m.attr("built_for_torch") = QCOLL_BUILT_FOR_TORCH;
  m.attr("pybind11_internals_version") = PYBIND11_INTERNALS_VERSION;
  register_errors(m);
  register_options(m);
  register_backend(m);
  register_codec_timer(m);
  m.def("encode", &encode, py::arg("tensor"), py::arg("codec"), Release());
  m.def(
      "decode",
      [](const at::Tensor& bytes, const std::vector<std::int64_t>& shape, const py::object& dtype,
         const std::string& codec) {
        TORCH_CHECK_TYPE(THPDtype_Check(dtype.ptr()), "qcoll.decode: dtype must be a torch.dtype");
        const auto type = reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
        const py::gil_scoped_release release;
        return decode(bytes, shape, type, codec);
      },
      py::arg("bytes"), py::arg("shape"), py::arg("dtype"), py::arg("codec"));
  m.def("isa", [] { return codec::best().isa; });
  m.def("isa_rows", [] {
    std::vector<std::string> names;
    for (const auto* row : codec::rows()) names.emplace_back(row->isa);
    return names;
  });
}
