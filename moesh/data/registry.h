#pragma once
// The kinds of data that a configuration can ask for, by name.

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "moesh/data/dataset.h"

namespace moesh::data {

/// One of several files.
struct SourceOptions {
  std::string kind = "auto", path = {}, name = {};
  double weight = 1;
};

/// Sequences are cut from all documents one behind the other, or are filled with whole ones.
constexpr const char *kCut = "cut", *kBestFit = "best_fit";

struct DatasetOptions {
  std::string kind = "auto";  // a name of the table below; auto: see resolved_kind
  std::string path = {};
  std::vector<SourceOptions> sources = {};  // instead of one path; see Mixture
  std::int64_t sequence_length = 64;
  // The model's vocabulary: a synthetic language has this size, and tokens of a file must fit into
  // it.
  std::int64_t vocab_size = 0;
  std::uint64_t seed = 0;
  bool shuffle = true;  // sequences of a file in another random order each time through
  std::int64_t synthetic_successors = 4;  // tokens that may follow one of the synthetic language
  std::string packing = kCut;             // how documents of a file become sequences
  std::string tokenizer = {};             // of text; empty: its bytes are tokens
  std::string token_folder = {};          // where the tokens of text are kept
};

/// A kind is an opener, and a line in the table of registry.cpp.
struct DatasetKind {
  std::string name;  // as data.kind has it
  bool reads_file;   // if not, it takes no path
  /// How the files end that `auto` takes for it: ".jsonl"; none: it must be named.
  std::vector<std::string> extensions;
  std::unique_ptr<Dataset> (*open)(const DatasetOptions& options);
  // Different tokens of such data: text, whose bytes they are without a tokenizer; 0: as many as
  // the model has.
  std::int64_t num_tokens = 0;
  bool has_documents = false;  // a file holds more than one
};

const std::vector<DatasetKind>& dataset_kinds();
/// The values of data.kind: auto, and the kinds; or only those kinds that read a file, or do not.
std::vector<std::string> dataset_choices(std::optional<bool> reads_file = {});
/// "auto: jsonl for *.jsonl, text for *.txt".
std::string dataset_help();

/// The meaning of `auto`: without a path the kind that reads none, else the kind with the longest
/// extension that fits. Any other name is its own. Where none fits, Error (config) says what to do,
/// and calls the option of the kind as it is called.
std::string resolved_kind(const std::string& kind, const std::string& path,
                          const std::string& kind_option = "data.kind");
/// The one of that name; throws Error (config) if there is none.
const DatasetKind& find_kind(const std::string& name);

std::unique_ptr<Dataset> open_dataset(const DatasetOptions& options);

}  // namespace moesh::data
