#pragma once
// The report of a step.

#include <ATen/core/Tensor.h>

#include <cmath>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "moesh/base/timeline.h"
#include "moesh/formats/json.h"
#include "moesh/train/step.h"

namespace moesh::train {

/// The load of the experts, from the tokens of each, layer by layer.
struct ExpertLoad {
  double max_over_mean = 0;          // of the busiest expert of a layer, in the worst layer
  std::int64_t num_idle = 0;         // experts without a token, of all layers
  std::vector<double> entropy = {};  // of each layer, in nats: ln(experts) where all have the same
};
ExpertLoad expert_load(const std::vector<at::Tensor>& counts_E);

/// The shares of numbers that rounding to float8 makes 0, and that get a code of the largest
/// magnitude, layer by layer; NaN: nothing is in float8 there.
struct Float8Share {
  const char* products;  // experts, dense
  const char* numbers;   // activations, gradients, weights
  std::vector<double> zeros, largest;
};
/// From the counts of a step (fsdp/float8_counts.h); none where they are undefined.
std::vector<Float8Share> float8_shares(const at::Tensor& counts);

/// The loss on one file that is not trained on.
struct ValidationLoss {
  std::string name;
  double loss;  // cross-entropy per valid token
  /// Means over the tokens that a depth of multi-token prediction may predict.
  struct Depth {
    double loss;
    double acceptance;  // the share that the model itself predicts when it comes to them
  };
  std::vector<Depth> mtp = {};

  double perplexity() const { return std::exp(loss); }
};

/// One step; numbers are those of all ranks, but for memory, times and bytes, which rank 0 has.
struct StepRecord {
  std::int64_t step = 0;  // from 1
  double time = 0;        // when it ended, in seconds since 1970
  double seconds = 0;     // from the end of the step before, without validation and saving
  double loss = 0;        // cross-entropy per valid token
  double total_loss = 0;  // with the auxiliary losses
  std::array<double, models::kNumAuxiliary> auxiliary = {};  // each with its weight in it
  double grad_norm = 0;                                      // before it was clipped
  std::optional<double> max_logit = {};  // of attention, before it was clipped; with QK-clip
  double lr = 0;
  std::int64_t num_tokens = 0;      // that were to be predicted
  std::int64_t num_read = 0;        // of all sequences, with those that were not
  std::int64_t num_tokens_all = 0;  // of all steps so far
  double flops_per_token = 0;
  double peak_tflops = 0;  // of all devices together; 0: unknown
  double memory_gib = 0;   // the most so far, of this process or its device
  SectionTimes sections = {};
  std::map<std::string, std::int64_t> sent = {};  // bytes, by the axes of the group
  ExpertLoad experts = {};
  std::vector<BiasRange> bias = {};  // of each MoE layer
  std::vector<at::Tensor> counts_E =
      {};  // of each MoE layer, int64, on the host; where they are due
  std::vector<Float8Share> float8 = {};         // where they were counted
  bool skipped = false;                         // nothing has moved
  std::vector<ValidationLoss> validation = {};  // after the step, where one was due

  /// The share of what was read: below 1 with a loss mask, at the ends of documents, and with
  /// padding.
  double trained_share() const {
    return num_read > 0 ? static_cast<double>(num_tokens) / static_cast<double>(num_read) : 1;
  }
  double tokens_per_second() const { return static_cast<double>(num_tokens) / seconds; }
  double tflops() const { return tokens_per_second() * flops_per_token / 1e12; }
  /// The fraction of the devices' peak: 0.4 is 40 %; 0 where that is not known.
  double peak_fraction() const { return peak_tflops > 0 ? tflops() / peak_tflops : 0; }
};

/// The names of the parts of the auxiliary losses.
constexpr const char* kAuxiliaryNames[models::kNumAuxiliary] = {"balance_loss", "z_loss",
                                                                "mtp_loss"};

/// A number of every record. metrics.jsonl has all of them, in this order, and metrics.csv and
/// TensorBoard those that they list by their names.
struct MetricNumber {
  const char* name;
  formats::JsonValue (*of)(const StepRecord& record);  // null: this record has none
  int num_digits = 0;  // that can mean something; 0: all, since runs on two meshes are compared
  bool is_left_out_at_zero = false;  // but in metrics.csv

  /// The number, unless the record has none, or it is left out.
  std::optional<double> found_in(const StepRecord& record) const;
};
const std::vector<MetricNumber>& metric_numbers();
const MetricNumber& metric_number(std::string_view name);

// A record as named numbers, for sinks that know nothing else.

using Scalars = std::vector<std::pair<std::string, double>>;

/// Under the tags of torchtitan's event files where it has them, and in their manner for the rest.
Scalars scalars_of(const StepRecord& record);

// Whether the router has given up experts: a loss that falls does not show it.

/// Looks at the tokens of every expert, step by step.
class CollapseWatch {
 public:
  static constexpr std::int64_t kPatience = 20;  // steps

  /// With the counts of a step, layer by layer: a warning for each layer in which a quarter of the
  /// experts or more have had no token for kPatience steps in a row. A layer is told of again only
  /// after it has recovered.
  std::vector<std::string> observe(const std::vector<at::Tensor>& counts_E);

 private:
  struct Layer {
    std::vector<std::int64_t> steps_idle;  // of each expert, in a row
    bool is_told = false;
  };
  std::vector<Layer> layers_;
};

// What the process, or its device, has in use, and can do.

/// The most memory that was in use so far, in GiB: the CUDA allocator's on cuda, else the process's
/// resident set.
double peak_memory_gib(const std::string& device);
/// "So far" begins anew, on cuda.
void reset_peak_memory(const std::string& device);

// The kind of a device, and its peak speed.

/// "NVIDIA H200", as the driver calls the GPUs of this machine where they are all the same; ""
/// if not, or if it is unknown. "cpu": the name of the processor.
std::string device_name(const std::string& device);

/// The peak of bfloat16 products without sparsity on one such GPU, in TFLOP/s, as its maker gives
/// it; 0 where moesh does not know it.
double peak_tflops(const std::string& device_name);

}  // namespace moesh::train
