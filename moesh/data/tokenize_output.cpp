#include "moesh/data/tokenize_files.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "moesh/base/error.h"
#include "moesh/formats/file.h"
#include "moesh/formats/file_system.h"
#include "moesh/formats/json.h"
#include "moesh/formats/manifest.h"

namespace moesh::data {
namespace {

using formats::OutputFile;

constexpr const char* kCure = "choose a folder (--out) that can be written and has room";
constexpr std::int64_t kChunk = std::int64_t{1} << 18;
constexpr const char* kBin = ".bin";
constexpr const char* kIdx = ".idx";
constexpr const char* kMask = ".mask";
constexpr const char* kManifest = ".moesh.json";
constexpr const char* kProgress = ".progress";
constexpr const char* kLengths = ".lengths";
constexpr const char* kWriter = ".writer";
constexpr const char* kPartialBin = ".bin.partial";
constexpr const char* kPartialIdx = ".idx.partial";
constexpr const char* kPartialMask = ".mask.partial";
constexpr const char* kPartialManifest = ".moesh.json.partial";

void remove_if_there(const std::string& path) {
  if (formats::file_system().remove(path) != 0 && errno != ENOENT)
    formats::fail_to("remove", path, errno, kCure);
}

void rename(const std::string& from, const std::string& to) {
  if (formats::file_system().rename(from, to) != 0)
    formats::fail_to("rename a file to", to, errno, kCure);
}

// A small file that is there as a whole, or as it was.
void replace_file(const std::string& path, std::string_view bytes) {
  const std::string partial = path + ".partial";
  remove_if_there(partial);
  {
    OutputFile file(partial, OutputFile::Mode::create, kCure);
    file.write(0, bytes);
    file.sync();
  }
  rename(partial, path);
}

// FNV-1a, a number at a time: it does not matter how they were cut into calls.
std::uint64_t hash_more(std::uint64_t hash, std::span<const std::int32_t> lengths) {
  for (const std::int32_t length : lengths)
    hash = (hash ^ static_cast<std::uint32_t>(length)) * 0x100000001b3;
  return hash;
}

// A name goes into JSON at the end of the work: it is better to know at its beginning.
void check_name(const std::string& what, const std::string& name) {
  try {
    formats::json_quoted(name);
  } catch (const Error&) {
    throw Error(ErrorKind::config, detail::concat(what, " '", name,
                                                  "' is not UTF-8, and PREFIX.moesh.json has to "
                                                  "name it; choose another name"));
  }
}

template <class T>
std::string_view bytes_of(std::span<const T> values) {
  return {reinterpret_cast<const char*>(values.data()), values.size_bytes()};
}

}  // namespace

TokenOutput::TokenOutput(std::string prefix, formats::IdType type, std::string work,
                         bool skips_errors, bool has_mask)
    : prefix_(std::move(prefix)), type_(type), work_(std::move(work)), has_mask_(has_mask) {
  check_name("--out", prefix_);
  const auto folder = std::filesystem::absolute(prefix_).parent_path();
  MOESH_CHECK(formats::is_folder(folder), ErrorKind::config, "--out ", prefix_, ": '",
              folder.string(), "' is not a folder; make it first");
  turn_ = std::make_unique<WriterLock>(prefix_);
  const bool goes_on = read_state(skips_errors);
  if (goes_on && state_.is_complete) {
    publish();
    return;
  }
  refuse_to_overwrite();
  if (!goes_on) {
    remove_if_there(path(kPartialBin));
    remove_if_there(path(kLengths));
    remove_if_there(path(kPartialMask));
  }
  const auto mode = goes_on ? OutputFile::Mode::open : OutputFile::Mode::create;
  ids_ = std::make_unique<OutputFile>(path(kPartialBin), mode, kCure);
  lengths_ = std::make_unique<OutputFile>(path(kLengths), mode, kCure);
  if (has_mask_) mask_ = std::make_unique<OutputFile>(path(kPartialMask), mode, kCure);
  if (goes_on) {
    check_lengths();
    ids_->go_on_after(static_cast<std::uint64_t>(state_.num_tokens) * formats::size_of(type_));
    if (mask_) mask_->go_on_after(static_cast<std::uint64_t>(state_.num_tokens));
  } else {
    write_state();
  }
}

TokenOutput::WriterLock::WriterLock(const std::string& prefix)
    : path_(prefix + kWriter), file_(path_, OutputFile::Mode::open_or_create, kCure) {
  // A file that has lost its name was removed by its holder between our two calls: whoever comes
  // now makes another one.
  MOESH_CHECK(file_.lock() && file_.has_its_name(), ErrorKind::config,
              "another moesh tokenize writes to ", prefix,
              "; wait for it, or choose another --out");
}

TokenOutput::WriterLock::~WriterLock() { formats::file_system().remove(path_); }

void TokenOutput::refuse_to_overwrite() const {
  for (const char* ending : {kBin, kIdx, kMask, kManifest})
    MOESH_CHECK(!formats::exists(path(ending)), ErrorKind::config, path(ending),
                " is there already; choose another --out, or move it away");
}

// The disk must have the bytes that were written, or the index would be made of something else.
void TokenOutput::check_lengths() const {
  std::uint64_t hash = kNoLengths;
  each_length([&](std::span<const std::int32_t> chunk) { hash = hash_more(hash, chunk); });
  MOESH_CHECK(hash == state_.lengths_hash, ErrorKind::data, path(kLengths),
              " is damaged: it has other bytes than were written; remove ", prefix_,
              ".progress, .lengths and .bin.partial to begin again");
}

bool TokenOutput::read_state(bool skips_errors) {
  if (!formats::exists(path(kProgress))) return false;
  const auto json = formats::read_json(path(kProgress));
  const auto number = [&](const char* key) { return json.at(key, path(kProgress)).as_int(key); };
  // A run that has written nothing, such as one that stopped at its first lines, may be replaced.
  const bool is_other = json.at("work", path(kProgress)).as_text("work") != work_;
  if (is_other && number("documents") == 0) return false;
  MOESH_CHECK(
      !is_other, ErrorKind::config, path(kProgress),
      " belongs to a run with another tokenizer, other options or other inputs (or an input has "
      "changed since); finish that one, or remove ",
      prefix_, ".progress, .lengths and .bin.partial to begin again");
  MOESH_CHECK(skips_errors || number("skipped") == 0, ErrorKind::config, path(kProgress),
              " belongs to a run that has skipped ", number("skipped"),
              " lines; continue with --on-error=skip, or remove ", prefix_,
              ".progress, .lengths and .bin.partial to begin again");
  for (const auto& [key, value] : counts()) *value = number(key);
  state_.lengths_hash = json.at("lengths_hash", path(kProgress)).as_size("lengths_hash");
  state_.is_complete = json.at("complete", path(kProgress)).as_bool("complete");
  return true;
}

std::vector<std::pair<const char*, std::int64_t*>> TokenOutput::counts() {
  return {{"file", &state_.place.file},         {"line", &state_.place.line},
          {"documents", &state_.num_documents}, {"tokens", &state_.num_tokens},
          {"empty", &state_.num_empty},         {"skipped", &state_.num_skipped},
          {"trained", &state_.num_trained},     {"untrained", &state_.num_untrained}};
}

void TokenOutput::write_state() {
  formats::JsonObject json{{"work", {work_}}};
  for (const auto& [key, value] : counts()) json.emplace_back(key, formats::JsonValue{*value});
  json.emplace_back("lengths_hash", formats::JsonValue{state_.lengths_hash});
  json.emplace_back("complete", formats::JsonValue{state_.is_complete});
  replace_file(path(kProgress), formats::to_json({std::move(json)}));
}

void TokenOutput::add(std::span<const std::int32_t> ids, std::span<const std::int32_t> lengths,
                      std::span<const std::uint8_t> mask) {
  MOESH_CHECK(mask.size() == (has_mask_ ? ids.size() : 0), "a mask of ", mask.size(), " for ",
              ids.size(), " tokens");
  if (has_mask_) mask_->write(static_cast<std::uint64_t>(state_.num_tokens), bytes_of(mask));
  state_.num_trained += std::count(mask.begin(), mask.end(), 1);
  const auto item = formats::size_of(type_);
  const std::uint64_t offset = static_cast<std::uint64_t>(state_.num_tokens) * item;
  if (type_ == formats::IdType::uint16) {
    const std::vector<std::uint16_t> narrow(ids.begin(), ids.end());
    ids_->write(offset, bytes_of(std::span<const std::uint16_t>(narrow)));
  } else {
    ids_->write(offset, bytes_of(ids));
  }
  lengths_->write(static_cast<std::uint64_t>(state_.num_documents) * 4, bytes_of(lengths));
  state_.lengths_hash = hash_more(state_.lengths_hash, lengths);
  state_.num_tokens += std::ssize(ids);
  state_.num_documents += std::ssize(lengths);
}

void TokenOutput::count(std::int64_t num_empty, std::int64_t num_skipped,
                        std::int64_t num_untrained) {
  state_.num_empty += num_empty;
  state_.num_skipped += num_skipped;
  state_.num_untrained += num_untrained;
}

void TokenOutput::save(TextPlace place) {
  ids_->sync();
  lengths_->sync();
  if (mask_) mask_->sync();
  state_.place = place;
  write_state();
}

void TokenOutput::each_length(const std::function<void(std::span<const std::int32_t>)>& f) const {
  const formats::InputFile lengths(path(kLengths));
  for (std::int64_t first = 0; first < state_.num_documents; first += kChunk) {
    std::vector<std::int32_t> chunk(
        static_cast<std::size_t>(std::min(kChunk, state_.num_documents - first)));
    lengths.read(static_cast<std::uint64_t>(first) * 4, std::as_writable_bytes(std::span(chunk)));
    f(chunk);
  }
}

formats::BlockSums TokenOutput::write_index() {
  remove_if_there(path(kPartialIdx));
  OutputFile out(path(kPartialIdx), OutputFile::Mode::create, kCure);
  std::uint64_t offset = 0;
  const auto put = [&](std::string_view bytes) {
    out.write(offset, bytes);
    offset += bytes.size();
  };
  put(formats::token_index_header(type_, state_.num_documents, state_.num_documents));
  check_lengths();
  each_length([&](std::span<const std::int32_t> chunk) { put(bytes_of(chunk)); });
  std::int64_t reached = 0;
  each_length([&](std::span<const std::int32_t> chunk) {
    std::vector<std::int64_t> offsets;
    for (const std::int32_t length : chunk) {
      offsets.push_back(reached);
      reached += length * static_cast<std::int64_t>(formats::size_of(type_));
    }
    put(bytes_of(std::span<const std::int64_t>(offsets)));
  });
  for (std::int64_t first = 0; first <= state_.num_documents; first += kChunk) {
    std::vector<std::int64_t> sequences;
    for (std::int64_t d = first; d < first + kChunk && d <= state_.num_documents; ++d)
      sequences.push_back(d);
    put(bytes_of(std::span<const std::int64_t>(sequences)));
  }
  out.sync();
  return out.sums();
}

void TokenOutput::finish(std::map<std::string, std::string> facts) {
  if (state_.is_complete) return;
  ids_->sync();
  lengths_->sync();
  if (mask_) mask_->sync();
  const formats::BlockSums index_sums = write_index();
  const std::filesystem::path whole = std::filesystem::absolute(prefix_);
  const std::string folder = whole.parent_path().string(), name = whole.filename().string();
  // All are read back and compared with what was in memory.
  formats::Manifest manifest{.extra = std::move(facts)};
  manifest.files.push_back(formats::hash_file(folder, name + kPartialBin, ids_->sums()));
  manifest.files.back().name = name + kBin;
  manifest.files.push_back(formats::hash_file(folder, name + kPartialIdx, index_sums));
  manifest.files.back().name = name + kIdx;
  if (mask_) {
    manifest.files.push_back(formats::hash_file(folder, name + kPartialMask, mask_->sums()));
    manifest.files.back().name = name + kMask;
  }
  remove_if_there(path(kPartialManifest));
  OutputFile out(path(kPartialManifest), OutputFile::Mode::create, kCure);
  out.write(0, formats::write_manifest(manifest));
  out.sync();
  state_.is_complete = true;
  write_state();
  publish();
}

// May be done again from anywhere in its middle. The mask comes first: never are there tokens
// without it.
void TokenOutput::publish() {
  for (const auto& [from, to] :
       {std::pair{kPartialMask, kMask}, std::pair{kPartialBin, kBin}, std::pair{kPartialIdx, kIdx},
        std::pair{kPartialManifest, kManifest}})
    if (formats::exists(path(from))) {
      MOESH_CHECK(!formats::exists(path(to)), ErrorKind::config, path(to),
                  " is there already, and ", path(from), " should get its name; move it away");
      rename(path(from), path(to));
    }
  remove_if_there(path(kLengths));
  remove_if_there(path(kProgress));
}

}  // namespace moesh::data
