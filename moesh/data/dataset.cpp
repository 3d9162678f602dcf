#include "moesh/data/dataset.h"

#include <ATen/ops/empty.h>

#include <limits>

#include "moesh/base/error.h"

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

}  // namespace moesh::data
