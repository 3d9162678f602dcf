#include "moesh/data/dataset.h"

#include <ATen/ops/empty.h>

#include <limits>

#include "moesh/base/error.h"

namespace moesh::data {

Sample Once::get(std::int64_t index) const {
  if (index < *of_.size()) return of_.get(index);
  const auto count = static_cast<std::size_t>(of_.sequence_length() + 1);
  return {.tokens = std::vector<TokenId>(count, 0),
          .documents = std::vector<std::int64_t>(count, kPadding)};
}

Batch make_batch(const Dataset& dataset, std::int64_t first, std::int64_t count) {
  MOESH_CHECK(first >= 0 && count >= 0 && first <= std::numeric_limits<std::int64_t>::max() - count,
              ErrorKind::config, "samples ", first, " and the ", count,
              " that follow do not exist; both numbers are 0 or more");
  const std::int64_t length = dataset.sequence_length();
  const auto make = [&] { return at::empty({count, length}, at::kLong); };
  Batch batch{.input_ids_BL = make(), .labels_BL = make(), .document_starts_BL = make()};
  auto* input = batch.input_ids_BL.mutable_data_ptr<std::int64_t>();
  auto* label = batch.labels_BL.mutable_data_ptr<std::int64_t>();
  auto* begin = batch.document_starts_BL.mutable_data_ptr<std::int64_t>();
  for (std::int64_t b = 0; b < count; ++b) {
    const Sample sample = dataset.get(first + b);
    const auto expected = static_cast<std::size_t>(length + 1);
    MOESH_CHECK(sample.tokens.size() == expected && sample.documents.size() == expected, "sample ",
                first + b, " has ", sample.tokens.size(), " tokens and ", sample.documents.size(),
                " document numbers, not ", expected);
    MOESH_CHECK(sample.trained.empty() || sample.trained.size() == expected, "sample ", first + b,
                " has a loss mask of ", sample.trained.size(), " tokens, not ", expected);
    const auto& documents = sample.documents;
    std::size_t start = 0;
    for (std::size_t t = 0; t + 1 < expected; ++t) {
      if (t == 0 || documents[t] != documents[t - 1]) start = t, ++batch.num_documents;
      const bool continues = documents[t] == documents[t + 1] && documents[t] != kPadding;
      *input++ = sample.tokens[t];
      *begin++ = static_cast<std::int64_t>(start);
      const bool is_trained = sample.trained.empty() || sample.trained[t + 1];
      *label++ = continues && is_trained ? sample.tokens[t + 1] : kIgnoredLabel;
    }
  }
  return batch;
}

}  // namespace moesh::data
