#pragma once
// The inputs of `moesh tokenize`, in the order in which they are read.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "moesh/formats/byte_source.h"
#include "moesh/formats/file.h"
#include "moesh/formats/token_file.h"

namespace moesh::data {

struct TextFile {
  std::string path;
  bool is_jsonl = false;
  std::uint64_t size = 0;       // as it lies on the disk; 0 for standard input
  std::int64_t changed_ns = 0;  // when it was written to, in nanoseconds
  std::uint64_t inode = 0;
};

/// Files, what is in folders (sorted, hidden names left out) and what globs match. `format`: auto,
/// text or jsonl.
std::vector<TextFile> find_text_files(const std::vector<std::string>& inputs,
                                      const std::string& format);

/// The inputs before some place: whole files, and lines of the next one.
struct TextPlace {
  std::int64_t file = 0, line = 0;
};

/// Lines or whole texts of one file, that are read by one thread.
struct TextBatch {
  const TextFile* file = nullptr;
  std::int64_t first_line = 0;          // from 1
  std::vector<std::string> texts;       // lines of JSONL, or one text
  std::vector<std::uint64_t> too_long;  // by text: its size, where that is beyond the limit; else 0
  TextPlace end;
  std::uint64_t num_bytes = 0;  // of the files, up to the end of this batch
};

class TextReader {
 public:
  TextReader(const std::vector<TextFile>& files, TextPlace from);
  /// Nothing at the end. Throws Error (data) at the end of a file that has changed since it was
  /// found.
  std::optional<TextBatch> next();

 private:
  std::optional<TextBatch> next_of_file();
  void check_unchanged() const;

  const std::vector<TextFile>& files_;
  TextPlace place_;
  std::optional<formats::LineReader> lines_;
  std::uint64_t bytes_before_ = 0;  // of files that are done
};

// The output of `moesh tokenize`. While it works there are
//
//   PREFIX.bin.partial   the ids so far         PREFIX.lengths    tokens of each document (i32)
//   PREFIX.mask.partial  their loss mask, of chats
//   PREFIX.progress      how far all are known to be on the disk, and for which inputs
//   PREFIX.writer        locked by the process that writes; goes with it
//
// and at the end PREFIX.mask, PREFIX.bin, PREFIX.idx and PREFIX.moesh.json, each renamed when it is
// whole.

struct TokenCounts {
  std::int64_t num_documents = 0, num_tokens = 0;
  std::int64_t num_empty = 0;      // documents without a token, which are left out
  std::int64_t num_skipped = 0;    // lines that could not be read
  std::int64_t num_trained = 0;    // of chats: tokens that a model is to predict
  std::int64_t num_untrained = 0;  // conversations without one, which are left out
};

class TokenOutput {
 public:
  static constexpr std::uint64_t kNoLengths = 0xcbf29ce484222325;
  /// The part that is known to be written.
  struct WrittenState : TokenCounts {
    TextPlace place;
    std::uint64_t lengths_hash = kNoLengths;  // of PREFIX.lengths
    bool is_complete = false;                 // only names are left to change
  };

  /// Continues the output of a run with the same `work` (a text with everything that matters).
  /// Output that has skipped lines is continued only if this run `skips_errors` as well.
  TokenOutput(std::string prefix, formats::IdType type, std::string work, bool skips_errors,
              bool has_mask);

  const WrittenState& state() const { return state_; }
  /// Ids of documents, how many each has, and the mask of the ids where there is to be one.
  void add(std::span<const std::int32_t> ids, std::span<const std::int32_t> lengths,
           std::span<const std::uint8_t> mask);
  void count(std::int64_t num_empty, std::int64_t num_skipped, std::int64_t num_untrained);
  /// Up to here nothing is lost from now on.
  void save(TextPlace place);
  /// Writes the index and the checksums, and gives the files their names. `facts` go into
  /// PREFIX.moesh.json.
  void finish(std::map<std::string, std::string> facts);

 private:
  std::string path(const char* ending) const { return prefix_ + ending; }
  void refuse_to_overwrite() const;
  bool read_state(bool skips_errors);
  /// f(lengths of some documents), in their order, of all that are written.
  void each_length(const std::function<void(std::span<const std::int32_t>)>& f) const;
  void check_lengths() const;
  void write_state();
  /// Those of the state, as PREFIX.progress calls them.
  std::vector<std::pair<const char*, std::int64_t*>> counts();
  formats::BlockSums write_index();
  void publish();

  /// PREFIX.writer, locked before anything else is looked at, and removed by its holder only.
  class WriterLock {
   public:
    explicit WriterLock(const std::string& prefix);  // throws Error (config) where another has it
    ~WriterLock();
    WriterLock(const WriterLock&) = delete;
    WriterLock& operator=(const WriterLock&) = delete;

   private:
    std::string path_;
    formats::OutputFile file_;
  };

  std::string prefix_;
  std::unique_ptr<WriterLock> turn_;
  formats::IdType type_;
  std::string work_;
  WrittenState state_;
  bool has_mask_;
  std::unique_ptr<formats::OutputFile> ids_, lengths_, mask_;
};

}  // namespace moesh::data
