#include "moesh/train/metrics/sink.h"

#include <charconv>
#include <cmath>
#include <utility>

#include "moesh/train/metrics/run_folder.h"

namespace moesh::train {
namespace {

using formats::JsonList;
using formats::JsonObject;
using formats::JsonValue;

// A measured number, rounded to what can mean something. JSON has no infinity and no NaN: null.
JsonValue rounded(double x, int num_digits) {
  if (!std::isfinite(x)) return {nullptr};
  char text[40];
  const auto end =
      std::to_chars(text, text + sizeof text, x, std::chars_format::general, num_digits).ptr;
  std::from_chars(text, end, x);
  return {x};
}

// With all its digits: runs on two meshes are compared by these.
JsonValue exact(double x) { return std::isfinite(x) ? JsonValue{x} : JsonValue{nullptr}; }

JsonValue sections_of(const StepRecord& r) {
  JsonObject seconds;
  for (std::size_t i = 0; i < kNumSections; ++i) {
    const auto section = static_cast<Section>(i);
    if (is_in_step(section) || r.sections[section] > 0)
      seconds.emplace_back(to_string(section), rounded(r.sections[section], 4));
  }
  return {std::move(seconds)};
}

// By layer.
template <class List, class F>
JsonValue layers(const List& list, const F& value_of) {
  JsonList values;
  values.reserve(list.size());
  for (const auto& layer : list) values.push_back(value_of(layer));
  return {std::move(values)};
}

JsonValue counts_of(const at::Tensor& counts_E) {
  const at::Tensor held = counts_E.contiguous();
  const auto* count = held.const_data_ptr<std::int64_t>();
  JsonList values;
  values.reserve(static_cast<std::size_t>(held.numel()));
  for (std::int64_t e = 0; e < held.numel(); ++e) values.emplace_back().value = count[e];
  return {std::move(values)};
}

void add_experts(JsonObject& object, const StepRecord& r) {
  if (r.experts.entropy.empty()) return;
  object.emplace_back("expert_entropy",
                      layers(r.experts.entropy, [](double x) { return rounded(x, 6); }));
  object.emplace_back("expert_bias", layers(r.bias, [](const BiasRange& b) {
                        return JsonValue{JsonList{rounded(b.least, 6), rounded(b.largest, 6)}};
                      }));
  if (!r.counts_E.empty()) object.emplace_back("expert_counts", layers(r.counts_E, counts_of));
}

// {"experts": {"activations": {"zeros": [..], "largest": [..]}, ..}, ..}
void add_float8(JsonObject& object, const StepRecord& r) {
  const auto share = [](double x) { return rounded(x, 4); };
  JsonObject all;
  for (const Float8Share& f : r.float8) {
    if (all.empty() || all.back().first != f.products)
      all.emplace_back(f.products, JsonValue{JsonObject{}});
    std::get<JsonObject>(all.back().second.value)
        .emplace_back(f.numbers, JsonValue{JsonObject{{"zeros", layers(f.zeros, share)},
                                                      {"largest", layers(f.largest, share)}}});
  }
  if (!all.empty()) object.emplace_back("float8", JsonValue{std::move(all)});
}

}  // namespace

JsonObject to_json(const StepRecord& r) {
  JsonObject object{
      {"step", {r.step}},
      {"time", rounded(r.time, 13)},
      {"loss", exact(r.loss)},
      {"total_loss", exact(r.total_loss)},
      {"grad_norm", exact(r.grad_norm)},
      {"lr", rounded(r.lr, 9)},
      {"seconds", rounded(r.seconds, 6)},
      {"tps", rounded(r.tokens_per_second(), 6)},
      {"tflops", rounded(r.tflops(), 6)},
      {"memory_gib", rounded(r.memory_gib, 4)},
      {"expert_max_over_mean", rounded(r.experts.max_over_mean, 6)},
      {"experts_idle", {r.experts.num_idle}},
      {"tokens", {r.num_tokens}},
      {"tokens_total", {r.num_tokens_all}},
      {"trained_share", rounded(r.trained_share(), 6)},
      {"skipped", {r.skipped}},
  };
  for (std::size_t i = 0; i < r.auxiliary.size(); ++i)
    if (r.auxiliary[i] != 0) object.emplace_back(kAuxiliaryNames[i], exact(r.auxiliary[i]));
  if (r.max_logit) object.emplace_back("max_logit", exact(*r.max_logit));
  if (r.peak_tflops > 0) object.emplace_back("peak_fraction", rounded(r.peak_fraction(), 5));
  object.emplace_back("sections", sections_of(r));
  if (!r.sent.empty()) {
    JsonObject sent;
    for (const auto& [axes, bytes] : r.sent) sent.emplace_back(axes, JsonValue{bytes});
    object.emplace_back("sent", JsonValue{std::move(sent)});
  }
  add_experts(object, r);
  add_float8(object, r);
  if (!r.validation.empty()) {
    JsonObject losses;
    for (const ValidationLoss& v : r.validation) {
      JsonObject of_set{{"loss", exact(v.loss)}, {"perplexity", exact(v.perplexity())}};
      JsonList depths;
      for (const auto& d : v.mtp)
        depths.emplace_back(
            JsonObject{{"loss", exact(d.loss)}, {"acceptance", exact(d.acceptance)}});
      if (!depths.empty()) of_set.emplace_back("mtp", JsonValue{std::move(depths)});
      losses.emplace_back(v.name, JsonValue{std::move(of_set)});
    }
    object.emplace_back("validation", JsonValue{std::move(losses)});
  }
  return object;
}

JsonlSink::JsonlSink(const std::filesystem::path& folder, std::int64_t first_step)
    : file_(open_run_folder(folder, first_step)) {}

void JsonlSink::write(const StepRecord& r) {
  file_.write_line(formats::to_json_line({to_json(r)}), r.step);
}

}  // namespace moesh::train
