#include "python/dataset.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <algorithm>

namespace moesh::python {
namespace nb = nanobind;
namespace {

using Integers = std::vector<std::int64_t>;

template <class T>
Integers copied(const nb::ndarray<nb::ro>& array) {
  const auto* data = static_cast<const T*>(array.data());
  Integers values(array.shape(0));
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<std::int64_t>(data[static_cast<std::int64_t>(i) * array.stride(0)]);
  return values;
}

std::string name_of_type(nb::handle object) {
  return nb::cast<std::string>(object.type().attr("__name__"));
}

// The integers of an array of any framework, without a copy in between.
Integers integers_of(const nb::ndarray<nb::ro>& array, const std::string& what) {
  MOESH_CHECK(array.ndim() == 1, ErrorKind::data, what, " has ", array.ndim(),
              " dims; return one dim of integers");
  MOESH_CHECK(array.device_type() == nb::device::cpu::value, ErrorKind::data, what,
              " is not on the host; return x.cpu()");
  const nb::dlpack::dtype dtype = array.dtype();
  const bool is_signed = dtype.code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::Int);
  const bool is_unsigned = dtype.code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::UInt);
  if (is_signed && dtype.bits == 64) return copied<std::int64_t>(array);
  if (is_signed && dtype.bits == 32) return copied<std::int32_t>(array);
  if (is_signed && dtype.bits == 16) return copied<std::int16_t>(array);
  if (is_signed && dtype.bits == 8) return copied<std::int8_t>(array);
  if (is_unsigned && dtype.bits == 64) return copied<std::uint64_t>(array);
  if (is_unsigned && dtype.bits == 32) return copied<std::uint32_t>(array);
  if (is_unsigned && dtype.bits == 16) return copied<std::uint16_t>(array);
  if (is_unsigned && dtype.bits == 8) return copied<std::uint8_t>(array);
  throw Error(ErrorKind::data,
              what + " does not hold integers; convert it, as in x.astype('int32')");
}

Integers integers_of(nb::handle object, const std::string& what) {
  nb::ndarray<nb::ro> array;
  if (nb::ndarray_check(object) && nb::try_cast(object, array, false))
    return integers_of(array, what);
  MOESH_CHECK(nb::isinstance<nb::sequence>(object) && !nb::isinstance<nb::str>(object),
              ErrorKind::data, what, " is of type ", name_of_type(object),
              "; return an array, a tensor or a list of integers");
  Integers values;
  for (nb::handle item : nb::borrow<nb::sequence>(object)) {
    std::int64_t value = 0;
    MOESH_CHECK(nb::try_cast(item, value, false), ErrorKind::data, what, " holds ",
                nb::cast<std::string>(nb::repr(item)), "; return only integers");
    values.push_back(value);
  }
  return values;
}

std::string description_of(nb::handle object, std::optional<std::int64_t> size) {
  if (nb::hasattr(object, "describe")) return nb::cast<std::string>(object.attr("describe")());
  const std::string name = name_of_type(object);
  return size ? detail::concat(name, " of ", *size, " samples") : name;
}

}  // namespace

PythonDataset::PythonDataset(nb::object object, std::int64_t sequence_length,
                             std::int64_t model_vocab_size, Raised& raised)
    : object_(std::move(object)), sequence_length_(sequence_length), raised_(raised) {
  MOESH_CHECK(nb::hasattr(object_, "__getitem__"), ErrorKind::config, "the dataset is of type ",
              name_of_type(object_),
              ", which has no __getitem__; every sample is asked for by its index, on any mesh and "
              "after a resume: give it __getitem__(index), and __len__() where it has an end");
  if (nb::hasattr(object_, "__len__")) {
    size_ = static_cast<std::int64_t>(nb::len(object_));
    MOESH_CHECK(*size_ > 0, ErrorKind::config, "the dataset, of type ", name_of_type(object_),
                ", has no sample: its len() is 0; give it one or more");
  }
  vocab_size_ = nb::hasattr(object_, "vocab_size")
                    ? nb::cast<std::int64_t>(object_.attr("vocab_size"))
                    : model_vocab_size;
  description_ = description_of(object_, size_);
}

data::Sample PythonDataset::get(std::int64_t index) const {
  return raised_.guard("the dataset", [&] { return sample(size_ ? index % *size_ : index); });
}

data::Sample PythonDataset::sample(std::int64_t index) const {
  const nb::object item = object_[nb::int_(index)];
  const std::string what = detail::concat("sample ", index, " of the dataset (", description_, ")");
  const std::size_t num_parts = nb::isinstance<nb::tuple>(item) ? nb::len(item) : 1;
  const bool is_tuple = (num_parts == 2 || num_parts == 3) && !nb::isinstance<nb::int_>(item[0]);
  const Integers ids = integers_of(is_tuple ? nb::object(item[0]) : item, what);
  const auto num = static_cast<std::size_t>(sequence_length_ + 1);
  MOESH_CHECK(ids.size() == num, ErrorKind::data, what, " has ", ids.size(),
              " token ids; it takes data.sequence_length + 1 = ", num,
              ", since the label of a token is the next one");
  data::Sample sample{.documents = Integers(num, 0)};
  if (is_tuple && !item[1].is_none())
    sample.documents = integers_of(nb::object(item[1]), "the documents of " + what);
  MOESH_CHECK(sample.documents.size() == num, ErrorKind::data, "the documents of ", what, " are ",
              sample.documents.size(), " numbers; it takes one for each of ", num, " token ids");
  if (is_tuple && num_parts == 3) {
    const Integers mask = integers_of(nb::object(item[2]), "the loss mask of " + what);
    MOESH_CHECK(mask.size() == num, ErrorKind::data, "the loss mask of ", what, " has ",
                mask.size(), " numbers; it takes one for each of ", num, " token ids");
    const auto wrong =
        std::find_if(mask.begin(), mask.end(), [](auto m) { return m != 0 && m != 1; });
    MOESH_CHECK(wrong == mask.end(), ErrorKind::data, "the loss mask of ", what, " has ", *wrong,
                " at position ", wrong - mask.begin(),
                "; it takes 1 for a token to predict, 0 for one that is only read");
    sample.trained.assign(mask.begin(), mask.end());
  }
  sample.tokens.reserve(num);
  for (std::size_t t = 0; t < num; ++t) {
    MOESH_CHECK(ids[t] >= 0 && ids[t] < vocab_size_, ErrorKind::data, what, ": id ", ids[t],
                " at position ", t, " is not in the vocabulary; it takes 0 to ", vocab_size_ - 1);
    sample.tokens.push_back(static_cast<data::TokenId>(ids[t]));
  }
  return sample;
}

}  // namespace moesh::python
