#pragma once
// Sequences of tokens by global sample index, and batches of them. A sample depends on its index
// alone, so the global batch is the same on every mesh. B sequences, L tokens each

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace moesh::data {

/// Labels that the loss leaves out.
constexpr std::int64_t kIgnoredLabel = -100;
/// Text is read as bytes, tokens 0 to 255, and kEndOfDocument closes every document.
constexpr std::int64_t kEndOfDocument = 256;
constexpr std::int64_t kNumByteTokens = 257;

/// sequence_length + 1 tokens: input and label of every position. Tokens with the same number in
/// `documents` belong together.
struct Sample {
  std::vector<std::int64_t> tokens, documents;
};

/// Any index >= 0 is a sample: a finite set begins again. Reading changes nothing, so ranks in
/// threads may share one.
class Dataset {
 public:
  virtual ~Dataset() = default;
  virtual Sample get(std::int64_t index) const = 0;
  virtual std::int64_t sequence_length() const = 0;
  /// Tokens are in [0, vocab_size()).
  virtual std::int64_t vocab_size() const = 0;
  /// Nats per label that no model can do without: the floor of the loss, where it is known.
  virtual std::optional<double> entropy() const { return std::nullopt; }
  /// For a log line: what it is and how much there is of it.
  virtual std::string describe() const = 0;
};

/// Labels are the next tokens: they are shifted here, before any cut over cp and tp.
struct Batch {
  at::Tensor input_ids_BL,
      labels_BL;  // int64, on the host; kIgnoredLabel where the next token begins another document
  at::Tensor document_ids_BL;  // int64
};

/// Samples first, first + 1, ... of the global order.
Batch make_batch(const Dataset& dataset, std::int64_t first, std::int64_t count);

/// How the samples of one step are dealt out: accumulation and dp are sub-ranges of one global
/// order, so that the same number of sequences a step gives the same set of sequences, however it
/// is split.
struct SampleOrder {
  std::int64_t batch = 1;  // sequences of a dp rank in a micro-batch
  std::int64_t num_dp = 1, num_micro = 1;

  std::int64_t num_per_step() const { return num_micro * num_dp * batch; }
  /// The samples of one dp rank's micro-batch are first(...) to first(...) + batch - 1.
  std::int64_t first(std::int64_t step, std::int64_t micro, std::int64_t dp_rank) const {
    return step * num_per_step() + (micro * num_dp + dp_rank) * batch;
  }
};

struct DatasetOptions {
  std::string kind = "auto";  // synthetic, text, jsonl; auto: see resolved_kind
  std::string path = {};
  std::int64_t sequence_length = 64;
  std::int64_t vocab_size =
      0;  // the model's; the synthetic language has as many tokens, those of a file must fit
  std::uint64_t seed = 0;
  bool shuffle = true;  // sequences of a file in another random order each time through
  std::int64_t synthetic_successors =
      4;  // tokens that may follow a token of the synthetic language
};

/// What `auto` stands for: no path is the synthetic language, *.jsonl is jsonl, any other file
/// text.
std::string resolved_kind(const std::string& kind, const std::string& path);

std::unique_ptr<Dataset> open_dataset(const DatasetOptions& options);

}  // namespace moesh::data
