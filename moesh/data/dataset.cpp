#include "moesh/data/dataset.h"

#include <ATen/ops/empty.h>

#include <limits>

#include "moesh/base/error.h"
#include "moesh/data/packed.h"
#include "moesh/data/synthetic.h"

namespace moesh::data {

Batch make_batch(const Dataset& dataset, std::int64_t first, std::int64_t count) {
  MOESH_CHECK(first >= 0 && count >= 0 && first <= std::numeric_limits<std::int64_t>::max() - count,
              ErrorKind::config, "samples ", first, " and the ", count,
              " that follow do not exist; both numbers are 0 or more");
  const std::int64_t length = dataset.sequence_length();
  const auto make = [&] { return at::empty({count, length}, at::kLong); };
  Batch batch{.input_ids_BL = make(), .labels_BL = make(), .document_ids_BL = make()};
  auto* input = batch.input_ids_BL.mutable_data_ptr<std::int64_t>();
  auto* label = batch.labels_BL.mutable_data_ptr<std::int64_t>();
  auto* document = batch.document_ids_BL.mutable_data_ptr<std::int64_t>();
  for (std::int64_t b = 0; b < count; ++b) {
    const Sample sample = dataset.get(first + b);
    const auto expected = static_cast<std::size_t>(length + 1);
    MOESH_CHECK(sample.tokens.size() == expected && sample.documents.size() == expected, "sample ",
                first + b, " has ", sample.tokens.size(), " tokens and ", sample.documents.size(),
                " document numbers, not ", expected);
    for (std::size_t t = 0; t + 1 < expected; ++t) {
      *input++ = sample.tokens[t];
      *document++ = sample.documents[t];
      *label++ =
          sample.documents[t] == sample.documents[t + 1] ? sample.tokens[t + 1] : kIgnoredLabel;
    }
  }
  return batch;
}

std::string resolved_kind(const std::string& kind, const std::string& path) {
  if (kind != "auto") return kind;
  if (path.empty()) return "synthetic";
  return path.ends_with(".jsonl") ? "jsonl" : "text";
}

std::unique_ptr<Dataset> open_dataset(const DatasetOptions& options) {
  const std::string kind = resolved_kind(options.kind, options.path);
  MOESH_CHECK(kind == "synthetic" || kind == "text" || kind == "jsonl", ErrorKind::config,
              "data: kind is '", kind, "'; use auto, synthetic, text or jsonl");
  if (kind == "synthetic") {
    MOESH_CHECK(options.path.empty(), ErrorKind::config, "data: kind is synthetic, and path is '",
                options.path, "'; leave out one of them");
    return std::make_unique<SyntheticLanguage>(
        SyntheticOptions{.vocab_size = options.vocab_size,
                         .sequence_length = options.sequence_length,
                         .successors = options.synthetic_successors,
                         .seed = options.seed});
  }
  MOESH_CHECK(!options.path.empty(), ErrorKind::config, "data: kind is ", kind,
              ", and there is no path; name a file");
  auto dataset = std::make_unique<PackedDataset>(
      kind == "jsonl" ? read_jsonl_corpus(options.path) : read_text_corpus(options.path),
      options.sequence_length, options.seed, options.shuffle);
  MOESH_CHECK(
      options.vocab_size >= dataset->vocab_size(), ErrorKind::config, "data: ", options.path,
      " is read as ", dataset->vocab_size(),
      " different tokens (bytes, and one that ends a document), and the model's vocabulary has ",
      options.vocab_size, "; use a model with vocab_size = ", dataset->vocab_size(), " or more");
  return dataset;
}

}  // namespace moesh::data
