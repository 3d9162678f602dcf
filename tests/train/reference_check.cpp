#include "tests/train/reference_check.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "moesh/config/merge.h"
#include "moesh/formats/json.h"
#include "moesh/train/loop.h"
#include "tests/checkpoint/support.h"

namespace moesh::reference {
namespace {

using formats::JsonValue;

constexpr double kTolerance = 1e-10;

const JsonValue& all_runs() {
  static const JsonValue runs = formats::parse_json(
#include "tests/train/reference.inc"
      , "reference.inc");
  return runs;
}

// The numbers of a step by the names that torch_test.py gives them.
std::map<std::string, double> numbers_of(const train::StepRecord& r) {
  std::map<std::string, double> all{{"loss", r.loss},
                                    {"total_loss", r.total_loss},
                                    {"grad_norm", r.grad_norm},
                                    {"lr", r.lr},
                                    {"tokens", static_cast<double>(r.num_tokens)},
                                    {"skipped", r.skipped ? 1 : 0}};
  for (std::size_t i = 0; i < r.auxiliary.size(); ++i)
    all[train::kAuxiliaryNames[i]] = r.auxiliary[i];
  for (std::size_t layer = 0; layer < r.bias.size(); ++layer) {
    const std::string of_layer = " of layer " + std::to_string(layer);
    all["least bias" + of_layer] = r.bias[layer].least;
    all["largest bias" + of_layer] = r.bias[layer].largest;
    for (std::int64_t e = 0; e < r.counts_E[layer].numel(); ++e)
      all["expert " + std::to_string(e) + of_layer] = r.counts_E[layer][e].item<double>();
  }
  for (const auto& v : r.validation) {
    all["validation " + v.name] = v.loss;
    for (std::size_t k = 0; k < v.mtp.size(); ++k) {
      const std::string depth = "validation " + v.name + " mtp." + std::to_string(k);
      all[depth + ".loss"] = v.mtp[k].loss, all[depth + ".acceptance"] = v.mtp[k].acceptance;
    }
  }
  return all;
}

std::string differs(const train::StepRecord& record, const JsonValue& wanted) {
  const auto found = numbers_of(record);
  const auto& expected = wanted.as_object("step");
  for (const auto& [name, value] : expected) {
    const double number = value.as_number(name);
    const auto ours = found.find(name);
    if (ours == found.end()) return detail::concat("step ", record.step, " has no ", name);
    if (!(std::abs(ours->second - number) <= kTolerance * std::max(std::abs(number), 1e-3)))
      return detail::concat("step ", record.step, " ", name, ": ", ours->second,
                            ", and in PyTorch ", number);
  }
  for (const auto& [name, value] : found)
    if (!wanted.find(name)) return detail::concat("step ", record.step, " has a ", name);
  return "";
}

}  // namespace

std::vector<std::string> run_names() {
  std::vector<std::string> names;
  for (const auto& [name, run] : all_runs().as_object("runs")) names.push_back(name);
  return names;
}

std::string run_complaint(const std::string& name) {
  const JsonValue& run = all_runs().at(name, "a run");
  const TemporaryFolder folder;
  for (const auto& [file, text] : run.at("files", name).as_object("files"))
    std::ofstream(folder.path() / file, std::ios::binary) << text.as_text(file);
  Args args{"--dtype=float64", "--metrics.folder=", "--metrics.quiet"};
  for (const JsonValue& option : run.at("options", name).as_list("options")) {
    std::string text = option.as_text("option");
    const std::string here = "FOLDER";
    if (const auto at = text.find(here); at != std::string::npos)
      text.replace(at, here.size(), folder.path().string());
    args.push_back(text);
  }
  const auto& steps = run.at("steps", name).as_list("steps");
  std::string complaint;
  std::size_t num_steps = 0;
  try {
    train::train(config::load_config(args), {.on_step = [&](const train::StepRecord& record) {
                   if (complaint.empty() && num_steps < steps.size())
                     complaint = differs(record, steps[num_steps]);
                   ++num_steps;
                 }});
  } catch (const Error& e) {
    return complaint.empty() ? detail::concat("it throws: ", e.what()) : complaint;
  }
  if (complaint.empty() && num_steps != steps.size())
    return detail::concat(num_steps, " steps, and in PyTorch ", steps.size());
  return complaint;
}

}  // namespace moesh::reference
