#include "moesh/data/tokenize.h"

#include <algorithm>
#include <cstdio>
#include <vector>

#include "moesh/base/error.h"
#include "moesh/base/text.h"
#include "moesh/formats/file.h"
#include "moesh/formats/manifest.h"
#include "moesh/formats/token_file.h"
#include "moesh/tokenizer/tokenizer.h"

namespace moesh::data {
namespace {

std::string prefix_of(std::string path) {
  for (const std::string_view ending : {".bin", ".idx", ".mask", ".moesh.json"})
    if (path.ends_with(ending)) return path.substr(0, path.size() - ending.size());
  return path;
}

std::string find_tokenizer(const std::string& prefix, const std::string& named) {
  if (!named.empty()) return tokenizer::file_of(named).string();
  const std::string path = prefix + ".moesh.json";
  std::string found;
  if (formats::exists(path)) {
    const auto facts =
        formats::parse_manifest(formats::read_file(path, ErrorKind::data), path).extra;
    if (const auto fact = facts.find("tokenizer"); fact != facts.end()) found = fact->second;
  }
  MOESH_CHECK(!found.empty() && formats::exists(found), ErrorKind::config, prefix,
              ".bin holds token ids, and the tokenizer that made them ",
              found.empty() ? std::string("is not known") : "('" + found + "') is not there",
              "; name it with --tokenizer");
  return found;
}

std::string share(std::int64_t part, std::int64_t all) {
  char text[64];
  std::snprintf(
      text, sizeof text, " (%.1f %%)",
      100 * static_cast<double>(part) / static_cast<double>(std::max<std::int64_t>(all, 1)));
  return with_commas(part) + text;
}

std::int64_t count_trained(const formats::TokenFile& file, std::int64_t begin, std::int64_t end) {
  constexpr std::int64_t kChunk = std::int64_t{1} << 20;
  std::int64_t count = 0;
  for (; begin < end; begin += kChunk) {
    std::vector<std::uint8_t> mask(static_cast<std::size_t>(std::min(kChunk, end - begin)));
    file.copy_mask(begin, mask);
    count += std::count(mask.begin(), mask.end(), 1);
  }
  return count;
}

// Text of the ids, with marks around runs that are trained on. A run is what all ids up to its end
// are decoded to, less what those before it are: decoders drop spaces at the beginning of a text.
std::string marked(const tokenizer::Tokenizer& tokenizer, const std::vector<std::int32_t>& ids,
                   const std::vector<std::uint8_t>& mask, const ShowOptions& options) {
  std::string text, shown;
  for (std::size_t begin = 0, end; begin < ids.size(); begin = end) {
    end = begin + 1;
    while (end < ids.size() && (mask.empty() || mask[end] == mask[begin])) ++end;
    const std::span<const std::int32_t> all(ids);
    const std::string longer = tokenizer.decode(all.first(end));
    const std::string run = longer.starts_with(text)
                                ? longer.substr(text.size())
                                : tokenizer.decode(all.subspan(begin, end - begin));
    const bool is_trained = !mask.empty() && mask[begin] == 1;
    shown += is_trained ? options.begin_trained + for_terminal(run) + options.end_trained
                        : for_terminal(run);
    text = longer;
  }
  return shown;
}

}  // namespace

std::string show_document(const ShowOptions& options) {
  const std::string prefix = prefix_of(options.path);
  MOESH_CHECK(formats::exists(prefix + ".bin") && formats::exists(prefix + ".idx"),
              ErrorKind::config, "'", options.path,
              "' is neither a folder nor a file of tokens: there is no ", prefix, ".bin with ",
              prefix, ".idx; name a checkpoint, or what moesh tokenize has written");
  const auto file = formats::TokenFile::open_indexed(prefix);
  const std::int64_t num = file.num_documents(), number = options.document;
  MOESH_CHECK(number < num, ErrorKind::config, "--document is ", number, ", and ", file.name(),
              " has ", num, ", counted from 0");
  const std::string path = find_tokenizer(prefix, options.tokenizer);
  const auto tokenizer = tokenizer::Tokenizer::read(path);
  const std::int64_t begin = file.start(number);
  const std::int64_t end = number + 1 < num ? file.start(number + 1) : file.num_tokens();
  std::vector<std::int32_t> ids(static_cast<std::size_t>(end - begin));
  file.copy(begin, tokenizer.vocab_size(), ids);
  std::vector<std::uint8_t> mask(file.has_mask() ? ids.size() : 0);
  if (file.has_mask()) file.copy_mask(begin, mask);
  const auto trained = [&](std::int64_t from, std::int64_t to) {
    return file.has_mask() ? ", " + share(count_trained(file, from, to), to - from) + " trained on"
                           : std::string();
  };
  std::string text = detail::concat(
      printable(file.name()), ": ", counted(num, "document"), ", ",
      counted(file.num_tokens(), "token"), trained(0, file.num_tokens()),
      file.has_mask() ? "" : ", no loss mask: all are trained on", "\ntokenizer: ", printable(path),
      "\ndocument ", number, ": ", counted(end - begin, "token"), trained(begin, end), "\n\n");
  text += marked(tokenizer, ids, mask, options);
  return text.ends_with('\n') ? text : text + "\n";
}

}  // namespace moesh::data
