#include "moesh/data/registry.h"

#include <algorithm>

#include "moesh/base/error.h"
#include "moesh/base/text.h"
#include "moesh/data/mixture.h"
#include "moesh/data/packed.h"
#include "moesh/data/synthetic.h"
#include "moesh/formats/file.h"
#include "moesh/formats/token_file.h"

namespace moesh::data {
namespace {

constexpr const char* kAuto = "auto";

std::unique_ptr<Dataset> open_synthetic(const DatasetOptions& o) {
  return std::make_unique<SyntheticLanguage>(SyntheticOptions{.vocab_size = o.vocab_size,
                                                              .sequence_length = o.sequence_length,
                                                              .successors = o.synthetic_successors,
                                                              .seed = o.seed});
}

template <Corpus (*Read)(const std::string& path)>
std::unique_ptr<Dataset> open_bytes(const DatasetOptions& o) {
  auto dataset =
      std::make_unique<PackedDataset>(Read(o.path), o.sequence_length, o.seed, o.shuffle);
  MOESH_CHECK(
      o.vocab_size >= dataset->vocab_size(), ErrorKind::config, "data: ", o.path, " is read as ",
      dataset->vocab_size(),
      " different tokens (bytes, and one that ends a document), and the model's vocabulary has ",
      o.vocab_size, "; use a model with vocab_size = ", dataset->vocab_size(), " or more");
  return dataset;
}

std::unique_ptr<Dataset> pack(formats::TokenFile file, const DatasetOptions& o) {
  return std::make_unique<PackedDataset>(make_store(std::move(file), o.vocab_size),
                                         o.sequence_length, o.seed, o.shuffle);
}

std::unique_ptr<Dataset> open_indexed(const DatasetOptions& o) {
  const bool is_flat = o.path.ends_with(".bin") && formats::exists(o.path) &&
                       !formats::exists(o.path.substr(0, o.path.size() - 4) + ".idx");
  MOESH_CHECK(!is_flat, ErrorKind::config, "data: ", o.path,
              " has no .idx beside it; if it is nothing but ids, say of which size: data.kind = "
              "uint16 or uint32");
  return pack(formats::TokenFile::open_indexed(o.path), o);
}
std::unique_ptr<Dataset> open_npy(const DatasetOptions& o) {
  return pack(formats::TokenFile::open_npy(o.path), o);
}
template <formats::IdType Type>
std::unique_ptr<Dataset> open_flat(const DatasetOptions& o) {
  return pack(formats::TokenFile::open_flat(o.path, Type), o);
}

// `auto` and the names of some kinds.
template <class F>
std::vector<std::string> choices(F is_one) {
  std::vector<std::string> names{kAuto};
  for (const auto& kind : dataset_kinds())
    if (is_one(kind)) names.push_back(kind.name);
  return names;
}

struct Extension {
  std::string ending;
  const DatasetKind* kind;
};

// Longest first, so that the first which fits is the right one.
std::vector<Extension> extensions() {
  std::vector<Extension> all;
  for (const auto& kind : dataset_kinds())
    for (const auto& ending : kind.extensions) all.push_back({ending, &kind});
  std::stable_sort(all.begin(), all.end(), [](const Extension& a, const Extension& b) {
    return a.ending.size() > b.ending.size();
  });
  return all;
}

}  // namespace

const std::vector<DatasetKind>& dataset_kinds() {
  static const std::vector<DatasetKind> all{
      {"synthetic", /*reads_file=*/false, {}, open_synthetic},
      {"text", /*reads_file=*/true, {".txt"}, open_bytes<read_text_corpus>, kNumByteTokens},
      {"jsonl", /*reads_file=*/true, {".jsonl"}, open_bytes<read_jsonl_corpus>, kNumByteTokens},
      {"indexed", /*reads_file=*/true, {".bin", ".idx"}, open_indexed},
      {"npy", /*reads_file=*/true, {".npy"}, open_npy},
      {"uint16", /*reads_file=*/true, {}, open_flat<formats::IdType::uint16>},
      {"uint32", /*reads_file=*/true, {}, open_flat<formats::IdType::uint32>}};
  return all;
}

std::vector<std::string> dataset_choices() {
  return choices([](const DatasetKind&) { return true; });
}
std::vector<std::string> file_choices() {
  return choices([](const DatasetKind& kind) { return kind.reads_file; });
}
std::vector<std::string> choices_without_file() {
  return choices([](const DatasetKind& kind) { return !kind.reads_file; });
}

std::string dataset_help() {
  std::string text;
  for (const auto& [ending, kind] : extensions())
    text += detail::concat(text.empty() ? "auto: " : ", ", kind->name, " for *", ending);
  return text;
}

std::string resolved_kind(const std::string& kind, const std::string& path) {
  if (kind != kAuto) return kind;
  for (const auto& k : dataset_kinds())
    if (path.empty() && !k.reads_file) return k.name;
  for (const auto& [ending, k] : extensions())
    if (path.ends_with(ending)) return k->name;
  throw Error(ErrorKind::config,
              detail::concat("data: it is not known how to read '", path,
                             "'; name its kind (data.kind): ", joined_by_or(file_choices()),
                             "; or make tokens of it first: moesh tokenize"));
}

const DatasetKind& find_kind(const std::string& name) {
  for (const auto& kind : dataset_kinds())
    if (kind.name == name) return kind;
  throw Error(ErrorKind::config,
              detail::concat("data: kind is '", name, "'; use ", joined_by_or(dataset_choices())));
}

std::unique_ptr<Dataset> open_dataset(const DatasetOptions& options) {
  if (!options.sources.empty()) {
    std::vector<MixturePart> parts;
    for (const SourceOptions& source : options.sources) {
      DatasetOptions one = options;
      one.sources.clear(), one.kind = source.kind, one.path = source.path;
      parts.push_back({source.name, source.weight, open_dataset(one)});
    }
    return std::make_unique<Mixture>(std::move(parts));
  }
  const std::string name = resolved_kind(options.kind, options.path);
  const DatasetKind& kind = find_kind(name);
  MOESH_CHECK(kind.reads_file || options.path.empty(), ErrorKind::config, "data: kind is ",
              kind.name, ", and path is '", options.path, "'; leave out one of them");
  MOESH_CHECK(!kind.reads_file || !options.path.empty(), ErrorKind::config, "data: kind is ",
              kind.name, ", and there is no path; name a file");
  return kind.open(options);
}

}  // namespace moesh::data
