#pragma once
// The inputs of `moesh tokenize`, in the order in which they are read.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "moesh/formats/byte_source.h"

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

}  // namespace moesh::data
