#pragma once
// Folders of a model of text and images, such as published Llama 4: moesh reads their text model.

#include <string>

#include "moesh/formats/json.h"

namespace moesh::formats {

/// The config.json of the text model: what is under text_config, with the dtype of the whole; that
/// of a text model itself is returned as it is.
JsonValue text_model(const JsonValue& config_json);

/// The name that a tensor of such a folder has in the text model; empty: it is none of that.
std::string name_in_text_model(const std::string& name);
/// Whether a tensor with this name says that a folder is such a one.
bool is_of_text_and_images(const std::string& name);

}  // namespace moesh::formats
