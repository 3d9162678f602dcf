#pragma once
// The output of `moesh tokenize`. While it works there are
//
//   PREFIX.bin.partial   the ids so far         PREFIX.lengths    tokens of each document (i32)
//   PREFIX.mask.partial  their loss mask, of chats
//   PREFIX.progress      how far all are known to be on the disk, and for which inputs
//   PREFIX.writer        locked by the process that writes; goes with it
//
// and at the end PREFIX.mask, PREFIX.bin, PREFIX.idx and PREFIX.moesh.json, each renamed when it is
// whole.

#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>

#include "moesh/data/tokenize_input.h"
#include "moesh/formats/file.h"
#include "moesh/formats/token_file.h"

namespace moesh::data {

class TokenOutput {
 public:
  static constexpr std::uint64_t kNoLengths = 0xcbf29ce484222325;
  /// The part that is known to be written.
  struct WrittenState {
    TextPlace place;
    std::int64_t num_documents = 0, num_tokens = 0, num_empty = 0, num_skipped = 0;
    std::int64_t num_trained = 0, num_untrained = 0;  // tokens; conversations that were left out
    std::uint64_t lengths_hash = kNoLengths;          // of PREFIX.lengths
    bool is_complete = false;                         // only names are left to change
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
