#pragma once
// How the parameters of a model lie in the tensors of a folder that others wrote, or will read: a
// table, which import, export and conversion go through. Where a parameter's elements are is all
// that a model has to say.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "moesh/formats/json.h"
#include "moesh/formats/safetensors.h"

namespace moesh::formats {

/// The part of a parameter that is found in a tensor. Both are boxes: element `i` of the parameter
/// (per dimension) is in the tensor's view at i[p] - offset[p] along dimension dims[p], and at
/// `fixed` along the view's other dimensions. It extends as far as the view does.
///
///   expert 5 of w1 [E, F, D], tensor [F, D], view [1, F, D]
///       offset {5, 0, 0}, dims {0, 1, 2}
///   w3 [E, F, D] in gate_up [E, 2F, D], view [E, 2, F, D]
///       offset {0, 0, 0}, dims {0, 2, 3}, fixed {{1, 1}}
///   w1 [E, F, D] in [E, D, 2F], in x out, interleaved, view [E, D, F, 2]
///       offset {0, 0, 0}, dims {0, 2, 1}, fixed {{3, 0}}
struct Source {
  std::string param;
  std::vector<std::int64_t> offset;
  std::vector<std::size_t> dims;
  std::vector<std::pair<std::size_t, std::int64_t>> fixed = {};
};

/// A tensor of the folder, and which parameters it is made of.
struct DiskTensor {
  std::string name;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t>
      view;  // the shape, dimensions split (row-major); the number of elements is the same
  std::vector<Source> sources;
  std::optional<Dtype> dtype = {};  // always written in this one; else in that of the export
  bool is_copy =
      false;  // of what another tensor holds: it is written, and need not be there to read
};

/// A tensor that is one whole parameter, under another name or the same.
DiskTensor whole_tensor(const std::string& name, const std::string& param,
                        const std::vector<std::int64_t>& shape);

struct DiskTable {
  std::vector<DiskTensor> tensors;  // in the order in which they are written
  std::function<bool(std::string_view)> ignored =
      {};  // names that are often there and that nothing needs
  std::function<bool(std::string_view)> left_out =
      {};  // names that may be there and that this model does not compute: a user is told
  std::string to_read_them = {};  // what to do to have them all the same; empty: nothing helps
  std::function<std::string(std::string_view)> cure =
      {};  // what to do where the tensor of this name is missing; empty: unknown

  /// Throws Error (internal) unless every tensor is covered by its sources, without overlap.
  void validate() const;
};

/// What LoRA adds to a parameter: scale times b times a, which are parameters, [out, r] and [r,
/// in], or [E, out, r] and [E, r, in].
struct LoraTerm {
  std::string a, b;
  double scale = 1;
  std::optional<std::int64_t> half = {};  // w1 is 0 and w3 is 1 of a b [E, 2, F, r]
};

/// Routed experts one by one, or all of a layer in one tensor.
enum class ExpertLayout { per_expert, stacked };
inline constexpr ExpertLayout kExpertLayouts[] = {ExpertLayout::per_expert, ExpertLayout::stacked};
const char* to_string(ExpertLayout layout);

/// A model in a folder, or one that will be saved in a folder.
struct ModelOnDisk {
  std::string model_type;  // as config.json calls it
  std::int64_t num_layers = 0, num_experts = 0;
  std::function<DiskTable(ExpertLayout)> table;
  std::function<std::string(Dtype)> config_json;  // for weights of this type
};

// Folders of a model of text and images, such as published Llama 4: moesh reads their text model.

/// The config.json of the text model: what is under text_config, with the dtype of the whole; that
/// of a text model itself is returned as it is.
JsonValue text_model(const JsonValue& config_json);

/// The config.json of a folder, with 0 for num_nextn_predict_layers where the folder has weights,
/// and none of such a layer: transformers writes that field as 1 whatever the model has.
std::string with_layers_that_are_there(const std::string& config_json,
                                       const std::filesystem::path& folder);

/// The name that a tensor of such a folder has in the text model; empty: it is not in the text
/// model.
std::string name_in_text_model(const std::string& name);
/// Whether a tensor with this name says that a folder is such a one.
bool is_of_text_and_images(const std::string& name);

}  // namespace moesh::formats
