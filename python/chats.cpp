#include "python/chats.h"

#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>

#include "moesh/base/error.h"
#include "moesh/cli/commands.h"
#include "moesh/data/chats.h"
#include "moesh/data/tokenize.h"
#include "python/interruptible.h"

namespace moesh::python {
namespace nb = nanobind;
namespace {

using Ranges = std::vector<std::pair<std::size_t, std::size_t>>;

// What f raises as an Error: moesh.Error as it is, and anything else as a mistake of moesh.
template <class F>
auto as_error(nb::handle error, const F& f) {
  try {
    return f();
  } catch (nb::python_error& raised) {
    if (!raised.matches(error)) throw Error(ErrorKind::internal, raised.what());
    const auto kind = nb::cast<std::string>(raised.value().attr("kind"));
    throw Error(kind == "config" ? ErrorKind::config : ErrorKind::data,
                nb::cast<std::string>(nb::str(raised.value())));
  }
}

data::RenderedChat to_chat(const std::pair<std::string, Ranges>& rendered) {
  data::RenderedChat chat{.text = rendered.first, .trained = {}};
  for (const auto& [begin, end] : rendered.second) {
    MOESH_CHECK(begin <= end && end <= chat.text.size(), "trained part ", begin, " to ", end,
                " of a text of ", chat.text.size());
    chat.trained.push_back({begin, end});
  }
  return chat;
}

// For threads that do not have the GIL.
std::shared_ptr<PyObject> held(nb::object object) {
  return {object.release().ptr(), [](PyObject* last) {
            const nb::gil_scoped_acquire gil;
            Py_DECREF(last);
          }};
}

data::ChatTemplate open_template(nb::handle open, nb::handle error, const data::ChatOptions& o) {
  const nb::gil_scoped_acquire gil;
  return as_error(error, [&] {
    const nb::object made =
        open(o.format, o.tokenizer, o.template_file, o.roles, o.fields, o.variables);
    const auto render = held(made.attr("render"));
    return data::ChatTemplate{
        .render =
            [render, error](const std::string& line) {
              const nb::gil_scoped_acquire inner;
              return as_error(error, [&] {
                return to_chat(nb::cast<std::pair<std::string, Ranges>>(
                    nb::handle(render.get())(nb::bytes(line.data(), line.size()))));
              });
            },
        .facts = nb::cast<std::string>(made.attr("facts"))};
  });
}

void set_chat_templates(nb::object open, nb::handle error) {
  if (open.is_none()) return data::set_chat_templates(nullptr);
  data::set_chat_templates([kept = held(std::move(open)), error](const data::ChatOptions& o) {
    return open_template(kept.get(), error, o);
  });
}

nb::dict tokenize(const std::vector<std::string>& args) {
  const auto line = cli::read_command_line(cli::commands(), args);
  data::TokenizeOptions options = cli::tokenize_options(line.given);
  options.show_progress = false;
  data::TokenizeSummary s;
  run_interruptible([&] { s = data::tokenize(options); });
  nb::dict summary;
  summary["documents"] = s.num_documents;
  summary["tokens"] = s.num_tokens;
  summary["trained_tokens"] = s.has_mask ? s.num_trained : s.num_tokens;
  summary["without_trained_tokens"] = s.num_untrained;
  summary["empty"] = s.num_empty;
  summary["skipped"] = s.num_skipped;
  return summary;
}

// Ids of a text, and the bytes of its UTF-8 that each stands for.
std::pair<std::vector<tokenizer::TokenId>, Ranges> encode(const tokenizer::Tokenizer& tokenizer,
                                                          const std::string& text) {
  std::vector<tokenizer::TokenId> ids;
  std::vector<tokenizer::ByteRange> spans;
  tokenizer::EncodeBuffers buffers;
  tokenizer.encode(text, /*with_template=*/false, buffers, ids, &spans);
  Ranges ranges;
  for (const auto& [begin, end] : spans) ranges.emplace_back(begin, end);
  return {std::move(ids), std::move(ranges)};
}

}  // namespace

void bind_chats(nb::module_& m, nb::handle error) {
  using tokenizer::Tokenizer;
  nb::class_<Tokenizer>(m, "Tokenizer")
      .def_static("read", [](const std::string& path) { return Tokenizer::read(path); })
      .def("encode", &encode);
  m.def(
      "set_chat_templates", [error](nb::object open) { set_chat_templates(open, error); },
      nb::arg("open").none());
  m.def("tokenize", &tokenize, nb::arg("args"));
}

}  // namespace moesh::python
