// The Python module moesh._moesh: what moesh/__init__.py builds its functions of. The GIL is
// released wherever moesh computes, and taken for each call of the user's code.

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>
#include <torch/csrc/autograd/python_variable.h>

#include <csignal>

#include "moesh/base/log.h"
#include "moesh/base/version.h"
#include "moesh/cli/command_line.h"
#include "moesh/cli/memory_errors.h"
#include "moesh/cli/program.h"
#include "moesh/comm/nccl/nccl_group.h"
#include "moesh/comm/rank_status.h"
#include "moesh/config/merge.h"
#include "moesh/estimate/estimate.h"
#include "moesh/estimate/search_time.h"
#include "moesh/train/metrics/sink.h"
#include "moesh/train/stop.h"
#include "moesh/verify/compare.h"
#include "moesh/verify/verify_all.h"
#include "python/chats.h"
#include "python/dataset.h"
#include "python/interruptible.h"

namespace moesh::python {
namespace nb = nanobind;
namespace {

using config::Config;
/// Options by name: what moesh/_settings.py makes of a dict or a dataclass.
using Values = std::vector<std::pair<std::string, config::Value>>;

Config config_of(const Values& values, const config::Settings& defaults = {}) {
  return config::load_settings(config::read_values(values, "Python"), defaults);
}

nb::object to_python(const formats::JsonValue& json);

nb::dict to_python(const formats::JsonObject& object) {
  nb::dict dict;
  for (const auto& [key, value] : object) dict[key.c_str()] = to_python(value);
  return dict;
}

nb::object to_python(const formats::JsonValue& json) {
  return std::visit(
      [](const auto& value) -> nb::object {
        using T = std::remove_cvref_t<decltype(value)>;
        if constexpr (std::is_same_v<T, std::nullptr_t>) {
          return nb::none();
        } else if constexpr (std::is_same_v<T, formats::JsonObject>) {
          return to_python(value);
        } else if constexpr (std::is_same_v<T, formats::JsonList>) {
          nb::list list;
          for (const auto& item : value) list.append(to_python(item));
          return list;
        } else {
          return nb::cast(value);
        }
      },
      json.value);
}

// Runs the handlers that Python has for signals that have come; throws what they raise.
void check_signals() {
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

train::RunSummary train(const Values& values, nb::object dataset, nb::object on_step) {
  // A signal ends the inner run, which would then wait for the outer one, which waits for it.
  MOESH_CHECK(!Raised::in_python(), ErrorKind::config,
              "moesh.train was called by on_step or the dataset of another run; call it when that "
              "run has returned");
  const Config config = config_of(values);
  Raised raised;
  std::optional<PythonDataset> data;
  if (!dataset.is_none())
    data.emplace(std::move(dataset), config.data.sequence_length,
                 models::facts(config.model.architecture).vocab_size, raised);
  train::CallerInfo caller;
  if (!on_step.is_none())
    caller.on_step = [&](const train::StepRecord& record) {
      raised.guard("on_step", [&] { on_step(to_python(train::to_json(record))); });
    };
  train::SignalScope signals;  // from here on a signal ends the run,
  check_signals();             // and one that came before, what is left of this call
  // When this run and those beside it have ended, with their checkpoints, a signal does what it
  // always does: SIGINT raises KeyboardInterrupt, SIGTERM ends the process.
  const auto leave = [&] {
    const nb::gil_scoped_release no_gil;
    signals.leave([](int signal) { std::raise(signal); });
  };
  train::RunSummary summary;
  try {
    const nb::gil_scoped_release no_gil;
    summary = cli::train_in_memory(config, caller, data ? &*data : nullptr);
  } catch (...) {
    if (train::stop_signal() != 0)
      log_warn("a run that was told to stop failed: ", comm::text_of(std::current_exception()));
    leave();
    raised.rethrow();
    throw;
  }
  leave();
  check_signals();
  return summary;
}

nb::dict verify(const Values& values, int steps, const std::optional<std::string>& sweep) {
  MOESH_CHECK(steps > 0, ErrorKind::config, "steps is ", steps, "; it takes 1 or more");
  const Config config = config_of(values, verify::verify_defaults(steps));
  std::optional<verify::Sweep> meshes;
  if (sweep) meshes = verify::parse_sweep(*sweep);
  nb::list results;
  bool all_hold = true;
  run_interruptible([&] {
    cli::naming_sizes(config, [&] {
      cli::check_fits(config);
      verify::verify_all(verify::meshes_of(config, meshes), steps, false,
                         [&](const verify::Verified& v) {
                           const nb::gil_scoped_acquire gil;
                           nb::object result = to_python(verify::to_json(v));
                           result["text"] = v.report.describe(mesh_shape(v.config));
                           results.append(result);
                           all_hold &= v.report.holds();
                         });
    });
  });
  nb::dict result;
  result["holds"] = all_hold;
  result["meshes"] = results;
  return result;
}

nb::object estimate(const Values& values) {
  const Config config = config_of(values);
  estimate::Estimate e;
  run_interruptible([&] { cli::naming_sizes(config, [&] { e = estimate::estimate(config); }); });
  return to_python(to_json(e));
}

// The time of a step, for the configuration.
nb::object estimate_in_time(const Values& values, const std::string& cluster_text) {
  const Config config = config_of(values);
  const estimate::Cluster cluster = estimate::parse_cluster(cluster_text);
  estimate::StepTime found;
  run_interruptible([&] {
    cli::naming_sizes(config, [&] {
      estimate::Profiler profiler(config);
      estimate::check_fills(mesh_shape(config), cluster);
      found = step_time(profiler, cluster, mesh_shape(config), estimate::order_of(config));
    });
  });
  return to_python(to_json(found));
}

// A list of the fastest, on a cluster or on so many H100.
nb::list search(const Values& values, const std::optional<std::string>& cluster_text, int num_ranks,
                const std::optional<std::string>& memory, int most) {
  const Config asked = config_of(values);
  MOESH_CHECK(cluster_text || num_ranks > 0, ErrorKind::config, "search is ", num_ranks,
              "; it takes 1 or more");
  const estimate::Cluster cluster =
      cluster_text ? estimate::parse_cluster(*cluster_text) : estimate::assumed_cluster(num_ranks);
  const double limit = memory ? static_cast<double>(cli::parse_size(*memory)) : cluster.memory;
  std::vector<std::string> chosen;
  const Config config = with_sensible_sizes(asked, cluster, chosen);
  std::vector<estimate::StepTime> found;
  run_interruptible([&] {
    cli::naming_sizes(config, [&] {
      found = search_time(config, cluster, limit, static_cast<std::size_t>(most),
                          [](int, int, const estimate::TimeSearch&) {})
                  .best;
    });
  });
  nb::list results;
  for (const auto& t : found) results.append(to_python(to_json(t)));
  return results;
}

// A path, or pairs of a name and a torch.Tensor, whose memory is used where it is.
verify::Compared compared(nb::handle given) {
  if (nb::isinstance<nb::str>(given)) return nb::cast<std::string>(given);
  verify::TensorList tensors;
  for (nb::handle pair : nb::borrow<nb::list>(given)) {
    const nb::object tensor = pair[1];
    const auto name = nb::cast<std::string>(pair[0]);
    MOESH_CHECK(THPVariable_Check(tensor.ptr()), ErrorKind::data, name, " is not a torch.Tensor");
    tensors.emplace_back(name, THPVariable_Unpack(tensor.ptr()));
  }
  return tensors;
}

verify::Comparison compare(nb::handle a, nb::handle b, std::optional<double> tolerance,
                           const std::vector<std::pair<std::string, std::string>>& renames) {
  const verify::Compared of_a = compared(a), of_b = compared(b);
  verify::Comparison result;
  run_interruptible(
      [&] { result = verify::compare(of_a, of_b, {.tolerance = tolerance, .renames = renames}); });
  return result;
}

int run_program(const std::vector<std::string>& args) {
  const nb::gil_scoped_release no_gil;
  return cli::run_program(args);
}

// moesh.Error, with the kind of the C++ one.
nb::handle register_error(nb::module_& m) {
  static PyObject* type = PyErr_NewExceptionWithDoc(
      "moesh.Error",
      "What moesh refuses, and the way out. kind: config, data, storage, comm, device, diverged or\n"
      "internal.",
      PyExc_RuntimeError, nullptr);
  m.attr("Error") = nb::handle(type);
  nb::register_exception_translator(
      [](const std::exception_ptr& thrown, void*) {
        try {
          std::rethrow_exception(thrown);
        } catch (const Error& e) {
          nb::object error = nb::handle(type)(e.what());
          error.attr("kind") = to_string(e.kind());
          PyErr_SetObject(type, error.ptr());
        }
      },
      nullptr);
  return type;
}

const char* to_string(verify::ComparedTensor::Verdict state) {
  using State = verify::ComparedTensor::Verdict;
  switch (state) {
    case State::same: return "same";
    case State::differs: return "differs";
    case State::shape_differs: return "shape differs";
    case State::only_in_a: return "only in a";
    case State::only_in_b: return "only in b";
  }
  return "";
}

void bind_results(nb::module_& m) {
  using train::RunSummary;
  nb::class_<RunSummary>(m, "RunSummary", "What a run came to.")
      .def_ro("num_steps", &RunSummary::num_steps, "Steps that were run.")
      .def_ro("first_step", &RunSummary::first_step, "Taken before, by the run that was resumed.")
      .def_ro("losses", &RunSummary::losses, "Cross-entropy per token of every step.")
      .def_ro("entropy", &RunSummary::entropy, "The floor of the loss, where the data knows it.")
      .def_ro("first_step_seconds", &RunSummary::first_step_seconds)
      .def_ro("step_seconds", &RunSummary::step_seconds, "Median of the later ones.")
      .def_ro("interrupted", &RunSummary::interrupted)
      .def_ro("folder", &RunSummary::folder, "Where metrics.jsonl is.")
      .def("__repr__", [](const RunSummary& s) {
        return detail::concat("RunSummary(", s.interrupted ? "stopped" : "done", " after step ",
                              s.first_step + s.num_steps,
                              s.losses.empty() ? "" : detail::concat(", loss ", s.losses.back()),
                              ", folder '", s.folder, "')");
      });
  using verify::ComparedTensor;
  nb::class_<ComparedTensor>(m, "ComparedTensor", "A tensor of a and its counterpart in b.")
      .def_ro("name", &ComparedTensor::name)
      .def_ro("other_name", &ComparedTensor::other_name)
      .def_prop_ro("state", [](const ComparedTensor& t) { return to_string(t.state); })
      .def_ro("shape", &ComparedTensor::shape)
      .def_ro("other_shape", &ComparedTensor::other_shape)
      .def_prop_ro("error", &ComparedTensor::relative, "|a - b| / |b|")
      .def_ro("factor", &ComparedTensor::factor, "<a, b> / <b, b>")
      .def_ro("worst_index", &ComparedTensor::worst_index)
      .def_prop_ro("diagnosis", &ComparedTensor::diagnosis, "What the factor says.")
      .def("__repr__", &ComparedTensor::describe);
  using verify::Comparison;
  nb::class_<Comparison>(m, "Comparison", "Two sets of tensors, name by name.")
      .def_prop_ro("same", &Comparison::same)
      .def_ro("tensors", &Comparison::tensors)
      .def_prop_ro("first_difference", &Comparison::first_difference,
                   nb::rv_policy::reference_internal)
      .def("describe", &Comparison::describe, nb::arg("all") = false,
           "What `moesh compare` prints; with all of the tensors, also those that are the same.")
      .def("__bool__", &Comparison::same)
      .def("__repr__", [](const Comparison& c) { return c.describe(); });
}

}  // namespace

NB_MODULE(_moesh, m) {
  comm::prepare_cuda();
  bind_chats(m, register_error(m));
  bind_results(m);
  m.attr("version") = version();
  m.def("train", &train, nb::arg("values"), nb::arg("dataset").none(), nb::arg("on_step").none());
  m.def("verify", &verify, nb::arg("values"), nb::arg("steps"), nb::arg("sweep").none());
  m.def("estimate", &estimate, nb::arg("values"));
  m.def("search", &search, nb::arg("values"), nb::arg("cluster").none(), nb::arg("num_ranks"),
        nb::arg("memory").none(), nb::arg("most"));
  m.def("estimate_in_time", &estimate_in_time, nb::arg("values"), nb::arg("cluster"));
  m.def("compare", &compare, nb::arg("a"), nb::arg("b"), nb::arg("tolerance").none(),
        nb::arg("renames"));
  m.def("print_config", [](const Values& values) { return print_config(config_of(values)); });
  m.def("run_program", &run_program, nb::arg("args"));
}

}  // namespace moesh::python
