#pragma once
// Chat templates, which Python runs, for `moesh tokenize`.

#include <nanobind/nanobind.h>

namespace moesh::python {

/// Adds set_chat_templates, tokenize and Tokenizer to the module. `error` is moesh.Error.
void bind_chats(nanobind::module_& m, nanobind::handle error);

}  // namespace moesh::python
