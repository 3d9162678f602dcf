#pragma once
// A dataset that is a Python object.

#include <nanobind/nanobind.h>

#include "moesh/data/dataset.h"
#include "python/raised.h"

namespace moesh::python {

/// `object[index]` is a sample: sequence_length + 1 token ids, or a pair of them and the numbers of
/// their documents, each an array or tensor of integers on the host, or a sequence of ints. With
/// `len(object)` it begins again after so many; without, every index is asked for. Ranks and the
/// threads that read ahead ask in any order, one at a time: each call takes the GIL.
class PythonDataset final : public data::Dataset {
 public:
  /// `object` may have an attribute vocab_size (else it is `model_vocab_size`) and a method
  /// describe(), by which a run that goes on tells other data. Called with the GIL, as the
  /// destructor is.
  PythonDataset(nanobind::object object, std::int64_t sequence_length,
                std::int64_t model_vocab_size, Raised& raised);

  data::Sample get(std::int64_t index) const override;
  std::int64_t sequence_length() const override { return sequence_length_; }
  std::int64_t vocab_size() const override { return vocab_size_; }
  std::optional<std::int64_t> size() const override { return size_; }
  std::string describe() const override { return description_; }

 private:
  data::Sample sample(std::int64_t index) const;

  nanobind::object object_;
  std::int64_t sequence_length_, vocab_size_;
  std::optional<std::int64_t> size_;
  std::string description_;
  Raised& raised_;
};

}  // namespace moesh::python
