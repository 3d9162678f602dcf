#pragma once
// A rank's part of a tensor that is to be saved or loaded, and where it is in the tensors on disk.

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "moesh/formats/disk.h"
#include "moesh/fsdp/param.h"

namespace moesh::checkpoint {

using Sizes = std::vector<std::int64_t>;

/// A rank's part of one tensor: a parameter, or something shaped like it.
struct TensorPart {
  std::string name;
  Sizes shape;       // of the whole
  Region region;     // which box of it `value` is
  bool owned;        // of the ranks that have the same box, the one which writes it
  at::Tensor value;  // [region.length]; loading writes into it
};

/// The part of a parameter that this rank of the current mesh stores, or of an optimizer's state
/// that is split like it.
TensorPart part_of(const Stored& w);
TensorPart part_of(const Stored& w, const std::string& name, const at::Tensor& value);
/// A tensor that every rank has whole. Rank 0 writes it.
TensorPart replicated_part(const std::string& name, const at::Tensor& value, int rank);

std::int64_t num_elements(const Sizes& sizes);

formats::Dtype disk_dtype(at::ScalarType dtype);
/// Throws Error (data) for types that moesh does not compute with, such as float8; `what` names the
/// tensor.
at::ScalarType torch_dtype(formats::Dtype dtype, const std::string& what);

/// The box that a parameter and a tensor on disk have in common.
struct Overlap {
  Region param;  // in the whole parameter
  Region view;   // in the view of the tensor
};
/// The part of `region` of the source's parameter that is in the tensor; nothing if none is.
std::optional<Overlap> overlap_with(const formats::DiskTensor& tensor,
                                    const formats::Source& source, const Region& region);

/// The values of an overlap, their dimensions in the order of the view: [overlap.view.length], a
/// view into `part.value`.
at::Tensor in_view_order(const TensorPart& part, const formats::Source& source,
                         const Overlap& overlap);

/// f(first element in the view, first element in the box, number of elements) for each run of
/// elements of the box that are neighbours in the view.
void each_run(
    const Sizes& view, const Region& box,
    const std::function<void(std::int64_t in_view, std::int64_t in_box, std::int64_t length)>& f);

/// The values in host memory: of an accelerator through pinned memory, which LibTorch keeps for the
/// next ones, several times as fast as without.
at::Tensor to_host(const at::Tensor& value);

/// A box of a view with its values.
struct BoxWithValues {
  Region box;
  at::Tensor value;  // [box.length]
};
/// Joins boxes that are neighbours along one dimension, so that interleaved tensors are written in
/// long runs.
std::vector<BoxWithValues> merged(std::vector<BoxWithValues> boxes);

}  // namespace moesh::checkpoint
