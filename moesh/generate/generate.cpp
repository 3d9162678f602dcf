#include "moesh/generate/generate.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>
#include <span>
#include <vector>

#include "moesh/base/error.h"
#include "moesh/base/random.h"
#include "moesh/base/text.h"
#include "moesh/base/timeline.h"
#include "moesh/checkpoint/agree.h"
#include "moesh/comm/launch.h"
#include "moesh/fsdp/fsdp.h"
#include "moesh/train/checkpointer.h"

namespace moesh::generate {

namespace {

using Clock = std::chrono::steady_clock;

void check(const Config& config, const GenerateOptions& options) {
  const auto facts = models::facts(config.model.architecture);
  MOESH_CHECK(
      !options.prompt.empty(), ErrorKind::config,
      "the prompt is empty, and a model needs a token to continue; give it some text, or ids");
  for (const std::int64_t id : options.prompt)
    MOESH_CHECK(id >= 0 && id < facts.vocab_size, ErrorKind::config, "token ", id,
                " of the prompt is outside of the model's vocabulary of ", facts.vocab_size,
                "; the prompt and the model must use the same tokenizer");
  const auto length = static_cast<std::int64_t>(options.prompt.size());
  MOESH_CHECK(length + options.max_new_tokens - 1 <= facts.max_sequence, ErrorKind::config,
              "a prompt of ", counted(length, "token"), " and ", options.max_new_tokens,
              " new ones are more than the ", facts.max_sequence,
              " positions of the model; ask for ",
              std::max<std::int64_t>(0, facts.max_sequence - length + 1),
              " new tokens or fewer, or shorten the prompt");
}

}  // namespace

Generated generate(models::Model& model, comm::Group& world, const Config& config,
                   const GenerateOptions& options) {
  check(config, options);
  const kernels::UseGpuKernels chosen(model.gpu_kernels());
  const StepState state;  // of what is gathered ahead
  const auto forward = train::step_options(config).forward;
  const auto longs = at::TensorOptions(device(config)).dtype(at::kLong);
  nn::ModelKvCache kv_cache;
  Generated result;
  at::Tensor input_1L = at::tensor(options.prompt, at::kLong).unsqueeze(0).to(device(config));
  auto start = Clock::now();
  for (std::int64_t i = 0; i < options.max_new_tokens; ++i) {
    const at::Tensor logits_V = model.next_logits(input_1L, kv_cache, forward)[0];
    // Every dp rank has computed the same sequence; one of them chooses, should they differ in a
    // last bit.
    at::Tensor chosen_1 = at::zeros({1}, longs);
    if (world.rank() == 0) chosen_1.fill_(choose_token(logits_V, options.choose, i));
    chosen_1 = world.broadcast(chosen_1, 0);
    const auto id = chosen_1.item<std::int64_t>();
    result.ids.push_back(id);
    if (i == 0) {
      result.prompt_seconds = seconds_since(start);
      start = Clock::now();
    }
    result.has_stopped = options.stop.contains(id);
    if (result.has_stopped) break;
    input_1L = chosen_1.unsqueeze(0);
  }
  result.seconds = seconds_since(start);
  return result;
}

Generated generate(const Config& config, const GenerateOptions& options) {
  check(config, options);
  Generated result;
  comm::launch(
      mesh_shape(config).num_ranks(),
      [&](comm::Group& world) {
        const Mesh mesh(world, mesh_shape(config));
        const MeshScope scope(mesh);
        const auto model = train::make_model(config);
        checkpoint::together(world, [&](const checkpoint::Heartbeat& heartbeat) {
          train::load_initial_weights(config, *model, heartbeat);
        });
        Generated mine = generate(*model, world, config, options);
        if (world.rank() == 0) result = std::move(mine);
      },
      launch_options(config));
  return result;
}

void ChooseOptions::validate() const {
  MOESH_CHECK(std::isfinite(temperature) && temperature >= 0, ErrorKind::config, "temperature is ",
              temperature, "; it takes 0 (always the likeliest token) or more");
  MOESH_CHECK(top_p > 0 && top_p <= 1, ErrorKind::config, "top-p is ", top_p,
              "; it takes more than 0, and up to 1 (all tokens)");
}

std::int64_t choose_token(const at::Tensor& logits_V, const ChooseOptions& o, std::int64_t index) {
  o.validate();
  const at::Tensor logits = logits_V.to(at::kCPU, at::kDouble).contiguous();
  const std::span<const double> values(logits.data_ptr<double>(),
                                       static_cast<std::size_t>(logits.numel()));
  MOESH_CHECK(std::all_of(values.begin(), values.end(), [](double v) { return std::isfinite(v); }),
              ErrorKind::diverged,
              "a logit is not finite: the weights of this model have diverged, or are not whole");
  const auto largest = std::max_element(values.begin(), values.end());
  if (o.temperature == 0) return largest - values.begin();

  std::vector<double> weights(values.size());
  std::transform(values.begin(), values.end(), weights.begin(),
                 [&](double v) { return std::exp((v - *largest) / o.temperature); });
  double left = std::accumulate(weights.begin(), weights.end(), 0.0);
  std::vector<std::size_t> ids(weights.size());
  std::iota(ids.begin(), ids.end(), 0);
  if (o.top_p < 1) {
    std::stable_sort(ids.begin(), ids.end(),
                     [&](std::size_t a, std::size_t b) { return weights[a] > weights[b]; });
    const double wanted = o.top_p * left;
    double sum = 0;
    std::size_t count = 0;
    while (count < ids.size() && sum < wanted) sum += weights[ids[count++]];
    ids.resize(count), left = sum;
  }
  double rest = Random(o.seed, "generate").uniform(static_cast<std::uint64_t>(index)) * left;
  for (const std::size_t id : ids)
    if ((rest -= weights[id]) < 0) return static_cast<std::int64_t>(id);
  return static_cast<std::int64_t>(ids.back());  // the sum was rounded
}

}  // namespace moesh::generate
