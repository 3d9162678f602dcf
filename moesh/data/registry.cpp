#include "moesh/data/registry.h"

#include <algorithm>

#include "moesh/base/error.h"
#include "moesh/base/text.h"
#include "moesh/data/dataset.h"
#include "moesh/data/packed.h"
#include "moesh/data/tokenize.h"
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

std::unique_ptr<Dataset> packed(std::shared_ptr<const TokenStore> tokens, const DatasetOptions& o) {
  if (o.packing == kBestFit)
    return std::make_unique<BestFitDataset>(std::move(tokens), o.sequence_length, o.seed,
                                            o.shuffle);
  return std::make_unique<PackedDataset>(std::move(tokens), o.sequence_length, o.seed, o.shuffle);
}

std::unique_ptr<Dataset> pack(formats::TokenFile file, const DatasetOptions& o) {
  return packed(make_store(std::move(file), o.vocab_size), o);
}

template <Corpus (*Read)(const std::string& path)>
std::unique_ptr<Dataset> open_text(const DatasetOptions& o) {
  if (!o.tokenizer.empty())
    return pack(open_tokenized({.path = o.path,
                                .kind = resolved_kind(o.kind, o.path),
                                .tokenizer = o.tokenizer,
                                .folder = o.token_folder,
                                .vocab_size = o.vocab_size}),
                o);
  auto dataset = packed(std::make_shared<const Corpus>(Read(o.path)), o);
  MOESH_CHECK(
      o.vocab_size >= dataset->vocab_size(), ErrorKind::config, "data: ", o.path, " is read as ",
      dataset->vocab_size(),
      " different tokens (bytes, and one that ends a document), and the model's vocabulary has ",
      o.vocab_size, "; use a model with vocab_size = ", dataset->vocab_size(), " or more");
  return dataset;
}

std::unique_ptr<Dataset> open_indexed(const DatasetOptions& o) {
  const bool is_flat = o.path.ends_with(".bin") && formats::exists(o.path) &&
                       !formats::exists(o.path.substr(0, o.path.size() - 4) + ".idx");
  MOESH_CHECK(!is_flat, ErrorKind::config, "data: ", o.path,
              " has no .idx file next to it; if it holds only ids, set data.kind to uint16 or "
              "uint32");
  return pack(formats::TokenFile::open_indexed(o.path), o);
}
std::unique_ptr<Dataset> open_npy(const DatasetOptions& o) {
  return pack(formats::TokenFile::open_npy(o.path), o);
}
template <formats::IdType Type>
std::unique_ptr<Dataset> open_flat(const DatasetOptions& o) {
  return pack(formats::TokenFile::open_flat(o.path, Type), o);
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
      {"text", /*reads_file=*/true, {".txt"}, open_text<read_text_corpus>, kNumByteTokens},
      {"jsonl",
       /*reads_file=*/true,
       {".jsonl"},
       open_text<read_jsonl_corpus>,
       kNumByteTokens,
       /*has_documents=*/true},
      {"indexed", /*reads_file=*/true, {".bin", ".idx"}, open_indexed, 0, /*has_documents=*/true},
      {"npy", /*reads_file=*/true, {".npy"}, open_npy},
      {"uint16", /*reads_file=*/true, {}, open_flat<formats::IdType::uint16>},
      {"uint32", /*reads_file=*/true, {}, open_flat<formats::IdType::uint32>}};
  return all;
}

std::vector<std::string> dataset_choices(std::optional<bool> reads_file) {
  std::vector<std::string> names{kAuto};
  for (const auto& kind : dataset_kinds())
    if (kind.reads_file == reads_file.value_or(kind.reads_file)) names.push_back(kind.name);
  return names;
}

std::string dataset_help() {
  std::string text;
  for (const auto& [ending, kind] : extensions())
    text += detail::concat(text.empty() ? "format of the data; auto: " : ", ", kind->name, " for *",
                           ending);
  return text;
}

std::string resolved_kind(const std::string& kind, const std::string& path,
                          const std::string& kind_option) {
  if (kind != kAuto) return kind;
  for (const auto& k : dataset_kinds())
    if (path.empty() && !k.reads_file) return k.name;
  for (const auto& [ending, k] : extensions())
    if (path.ends_with(ending)) return k->name;
  MOESH_CHECK(!formats::exists(path + ".bin") || !formats::exists(path + ".idx"), ErrorKind::config,
              "data: '", path, "' is the name of two files, ", path, ".bin and ", path,
              ".idx; name one of them");
  MOESH_CHECK(!formats::is_folder(path), ErrorKind::config, "data: '", path,
              "' is a folder; name a file, or turn its files into one: moesh tokenize");
  MOESH_CHECK(formats::exists(path), ErrorKind::config, "data: there is no file '", path,
              "'; name one that is there");
  std::vector<std::string> kinds = dataset_choices(/*reads_file=*/true);
  std::erase(kinds, kAuto);
  throw Error(ErrorKind::config, detail::concat("data: unknown file type: '", path, "'; set ",
                                                kind_option, " to ", joined_by_or(kinds),
                                                ", or turn it into tokens first: moesh tokenize"));
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
      try {
        parts.push_back({source.name, source.weight, open_dataset(one)});
      } catch (const Error& e) {
        if (e.kind() != ErrorKind::storage) throw;
        // Each source holds a file open.
        throw Error(e.kind(),
                    detail::concat("data: source '", source.name, "', number ", parts.size() + 1,
                                   " of ", options.sources.size(), ": ", e.what()));
      }
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
