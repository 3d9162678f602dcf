#include "moesh/data/tokenize_files.h"

#include <glob.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>

#include "moesh/base/error.h"
#include "moesh/formats/file.h"
#include "moesh/formats/file_system.h"
#include "moesh/formats/json.h"

namespace moesh::data {
namespace {

constexpr std::size_t kBatchBytes = std::size_t{1} << 18;
constexpr std::size_t kMaxTextBytes = std::size_t{1} << 30;

bool ends_with_any(std::string_view text, std::initializer_list<const char*> endings) {
  return std::any_of(endings.begin(), endings.end(),
                     [&](const char* ending) { return text.ends_with(ending); });
}

// Takes down what changes when the file is written to, or replaced.
void look_at(TextFile& file) {
  struct stat status;
  if (formats::file_system().status(file.path, status) != 0)
    formats::fail_at(file.path, "look at", errno);
  file.size = static_cast<std::uint64_t>(status.st_size);
  file.changed_ns =
      std::int64_t{status.st_mtim.tv_sec} * 1'000'000'000 + std::int64_t{status.st_mtim.tv_nsec};
  file.inode = status.st_ino;
}

TextFile make_file(const std::string& path, const std::string& format) {
  TextFile file{.path = path, .is_jsonl = format == "jsonl"};
  if (format == "auto") {
    std::string_view name = path;
    for (const std::string_view packed : {".gz", ".zst"})
      if (name.ends_with(packed)) name.remove_suffix(packed.size());
    file.is_jsonl = ends_with_any(name, {".jsonl", ".ndjson"});
    MOESH_CHECK(file.is_jsonl || ends_with_any(name, {".txt", ".text", ".md"}), ErrorKind::config,
                path == "-" ? "standard input" : path,
                ": unknown file type; moesh reads *.jsonl, *.ndjson, *.txt, *.text and *.md, also "
                "packed as .gz or .zst. Name the format with --format text or --format "
                "jsonl (for Parquet: tools/parquet_to_jsonl.py)");
  }
  if (path == "-") return file;
  formats::InputFile{path};  // refuses what is not a file
  look_at(file);
  return file;
}

void add_folder(const std::filesystem::path& folder, std::vector<std::string>& paths) {
  for (const std::string& name : formats::names_in(folder)) {
    if (name.starts_with('.')) continue;
    const std::filesystem::path path = folder / name;
    if (formats::is_folder(path))
      add_folder(path, paths);
    else
      paths.push_back(path.string());
  }
}

void add_glob(const std::string& pattern, std::vector<std::string>& paths) {
  glob_t found{};
  const int result = ::glob(pattern.c_str(), 0, nullptr, &found);
  for (std::size_t i = 0; i < found.gl_pathc; ++i) paths.emplace_back(found.gl_pathv[i]);
  ::globfree(&found);
  MOESH_CHECK(result == 0, ErrorKind::config, "no file matches '", pattern,
              "'; check the pattern, and quote it so that the shell does not expand it");
}

}  // namespace

std::vector<TextFile> find_text_files(const std::vector<std::string>& inputs,
                                      const std::string& format) {
  std::vector<std::string> paths;
  for (const std::string& input : inputs) {
    if (input == "-") {
      paths.push_back(input);
    } else if (formats::is_folder(input)) {
      const std::size_t before = paths.size();
      add_folder(input, paths);
      MOESH_CHECK(paths.size() > before, ErrorKind::config, "the folder ", input, " has no files");
    } else if (input.find_first_of("*?[") != std::string::npos && !formats::exists(input)) {
      add_glob(input, paths);
    } else {
      paths.push_back(input);
    }
  }
  std::vector<TextFile> files;
  for (const std::string& path : paths) files.push_back(make_file(path, format));
  return files;
}

TextReader::TextReader(const std::vector<TextFile>& files, TextPlace from)
    : files_(files), place_(from) {
  for (std::int64_t i = 0; i < from.file; ++i)
    bytes_before_ += files_[static_cast<std::size_t>(i)].size;
}

std::optional<TextBatch> TextReader::next() {
  for (; place_.file < std::ssize(files_); ++place_.file, place_.line = 0) {
    if (auto batch = next_of_file()) {
      batch->end = place_;
      batch->num_bytes = bytes_before_ + lines_->position();
      return batch;
    }
    check_unchanged();
    bytes_before_ += files_[static_cast<std::size_t>(place_.file)].size;
    lines_.reset();
  }
  return std::nullopt;
}

// The bytes that were read of the file that ends here are those that it has.
void TextReader::check_unchanged() const {
  const TextFile& file = files_[static_cast<std::size_t>(place_.file)];
  if (file.path == "-") return;
  TextFile now{.path = file.path};
  look_at(now);
  MOESH_CHECK(
      now.size == file.size && now.changed_ns == file.changed_ns && now.inode == file.inode,
      ErrorKind::data, file.path,
      " was written to, or replaced, while it was read: the ids are of neither text; remove "
      "what was written, and start again when nothing writes to it");
}

// Lines of the file that is read now; nothing at its end.
std::optional<TextBatch> TextReader::next_of_file() {
  const TextFile& file = files_[static_cast<std::size_t>(place_.file)];
  std::string line;
  std::uint64_t size;
  if (!lines_) {
    lines_.emplace(formats::open_bytes(file.path),
                   file.is_jsonl ? formats::kMaxLineBytes : kMaxTextBytes);
    if (file.is_jsonl)
      for (std::int64_t i = 0; i < place_.line; ++i) lines_->next(line, size);
  }
  TextBatch batch{.file = &file, .first_line = place_.line + 1};
  if (!file.is_jsonl) {  // one text; its lines are put together again
    if (place_.line > 0) return std::nullopt;
    std::string text;
    std::uint64_t total = 0;
    while (lines_->next(line, size)) {
      total += size + 1;
      if (total <= kMaxTextBytes) text.append(line).push_back('\n');
      ++place_.line;
    }
    if (place_.line == 0) return std::nullopt;
    if (!lines_->ended_with_newline() && !text.empty() && total <= kMaxTextBytes) text.pop_back();
    batch.first_line = 1;
    batch.texts.push_back(std::move(text));
    batch.too_long.push_back(total > kMaxTextBytes ? total : 0);
    return batch;
  }
  for (std::size_t bytes = 0; bytes < kBatchBytes && lines_->next(line, size); ++place_.line) {
    bytes += line.size() + 1;
    batch.too_long.push_back(size > line.size() ? size : 0);
    batch.texts.push_back(std::move(line));
  }
  if (batch.texts.empty()) return std::nullopt;
  return batch;
}

}  // namespace moesh::data
