#pragma once
// The one path from a configuration to a step: model, optimizer, data, batches, options, learning
// rate. Whatever trains, verifies, estimates or checks a golden file takes them from here.

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "moesh/config/config.h"
#include "moesh/formats/disk.h"
#include "moesh/models/registry.h"
#include "moesh/optim/optimizer.h"
#include "moesh/train/step.h"

namespace moesh::train {

using config::Config;

/// How the routers of the model choose.
nn::RouterConfig router_config(const Config& config);

/// The parameters of the whole model that training.freeze names: by moesh's own names of
/// parameters, or by those that files have for them. Throws Error (config) where a name of it
/// matches none, or some experts of a layer and not all, or where nothing is left to train.
struct Frozen {
  std::set<std::string> names;  // of parameters
  std::int64_t num_parameters = 0;
  /// For ModelOptions.
  std::function<bool(const std::string& name)> is_frozen() const;
};
Frozen frozen(const Config& config);

/// How weights of the frozen model rest that rest quantized (lora.base), by the names of
/// parameters. Throws Error (config) where nothing says how.
std::map<std::string, kernels::Quantization> quantization(const Config& config);
/// "72 tensors in MXFP4".
std::string describe_quantization(const std::map<std::string, kernels::Quantization>& all);

/// On the current mesh; with its initial weights, before checkpoint.initial_load.
std::unique_ptr<models::Model> make_model(const Config& config);
/// On another device than that of the configuration: meta has only shapes.
std::unique_ptr<models::Model> make_model(const Config& config, at::Device device);

/// The parameters of the model that each [[optimizer.group]] matches. One that matches nothing
/// throws Error (config).
std::vector<optim::GroupMatch> group_matches(const Config& config);
std::unique_ptr<optim::Optimizer> make_optimizer(models::Model& model, const Config& config);

PipelineOptions pipeline_options(const Config& config);
StepOptions step_options(const Config& config);
UseGraph use_graph(const Config& config);

/// The learning rate by optimizer step; steps count from 0.
std::function<double(std::int64_t step)> learning_rates(const Config& config);

std::unique_ptr<data::Dataset> open_dataset(const Config& config);

/// The bound that kernels plan for where the micro-batches of a step have `num` documents at most:
/// one of few numbers, so that few graphs are recorded.
std::int64_t most_documents(std::int64_t batch, std::int64_t sequence, std::int64_t num);

/// Makes the micro-batches of this dp rank in the optimizer step whose first sample of the global
/// order is `data_position`, on the host, in any thread. The dataset outlives it.
std::function<std::vector<models::MicroBatch>(std::int64_t data_position)> host_batches(
    const Config& config, const data::Dataset& dataset, const Mesh& mesh);
std::vector<models::MicroBatch> on_device(at::Device device,
                                          std::vector<models::MicroBatch> batches);
/// On the device of the configuration.
inline std::vector<models::MicroBatch> step_batches(const Config& config,
                                                    const data::Dataset& dataset, const Mesh& mesh,
                                                    std::int64_t data_position) {
  return on_device(device(config), host_batches(config, dataset, mesh)(data_position));
}

/// The model's names in folders.
formats::ModelOnDisk on_disk(const Config& config);

}  // namespace moesh::train
