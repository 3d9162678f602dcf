#include "moesh/data/tokenize.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <future>
#include <limits>
#include <numeric>
#include <thread>

#include "moesh/base/error.h"
#include "moesh/base/log.h"
#include "moesh/base/text.h"
#include "moesh/base/this_thread.h"
#include "moesh/data/tokenize_files.h"
#include "moesh/formats/checksum.h"
#include "moesh/formats/file.h"
#include "moesh/formats/json.h"
#include "moesh/formats/manifest.h"
#include "moesh/tokenizer/tokenizer.h"

namespace moesh::data {
namespace {

using Clock = std::chrono::steady_clock;
using tokenizer::EncodeBuffers;
using tokenizer::Tokenizer;

constexpr std::int64_t kShownErrors = 10;
constexpr int kMaxThreads = 1024;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// The result of a batch of texts.
struct Encoded {
  TextBatch batch;
  std::vector<std::int32_t> ids, lengths;
  std::vector<std::uint8_t> mask;  // of chats
  std::int64_t num_empty = 0;
  std::vector<std::string> errors;
  std::vector<std::string> untrained;  // where conversations are that have no token to predict
};

class Encoder {
 public:
  Encoder(const TokenizeOptions& options, const Tokenizer& tokenizer,
          const std::optional<ChatTemplate>& chats)
      : options_(options), tokenizer_(tokenizer), chats_(chats) {
    if (options.end_of_document.empty()) return;
    const auto id = tokenizer.find(options.end_of_document);
    MOESH_CHECK(id, ErrorKind::config, "the tokenizer has no token '", options.end_of_document,
                "' to end documents with; name one with --eod");
    end_of_document_ = *id;
  }

  void run(Encoded& work, EncodeBuffers& buffers) const {
    for (std::size_t i = 0; i < work.batch.texts.size(); ++i) try {
        add(work, i, buffers);
      } catch (const Error& e) {
        if (!options_.skip_errors || e.kind() != ErrorKind::data) throw;
        work.errors.emplace_back(e.what());
      }
  }

 private:
  void add(Encoded& work, std::size_t i, EncodeBuffers& buffers) const {
    const TextFile& file = *work.batch.file;
    const std::string name = file.path == "-" ? "standard input" : file.path;
    const std::string where =
        file.is_jsonl
            ? detail::concat(name, ":", work.batch.first_line + static_cast<std::int64_t>(i), ": ")
            : name + ": ";
    MOESH_CHECK(work.batch.too_long[i] == 0, ErrorKind::data, where,
                file.is_jsonl ? "this line has " : "this text has ", work.batch.too_long[i],
                " bytes; at most ", file.is_jsonl ? formats::kMaxLineBytes : std::size_t{1} << 30,
                " are read: split the document");
    std::string text = std::move(work.batch.texts[i]);
    if (file.is_jsonl) {
      if (text.find_first_not_of(" \t\r") == std::string::npos) return;
      if (!chats_) text = formats::text_of_json_line(text, where, options_.field);
    }
    const std::size_t before = work.ids.size();
    try {
      if (chats_)
        add_chat(work, text, buffers);
      else
        tokenizer_.encode(text, options_.with_template, buffers, work.ids);
    } catch (const Error& e) {
      work.ids.resize(before);
      if (chats_) work.mask.resize(before);
      throw Error(e.kind(), where + e.what());
    }
    if (text.empty() || work.ids.size() == before) {
      work.ids.resize(before);
      ++work.num_empty;
      return;
    }
    if (end_of_document_ != tokenizer::kNoToken) work.ids.push_back(end_of_document_);
    if (chats_) {
      // Predicted as the token before it is.
      work.mask.resize(work.ids.size(), work.mask.back());
      // Nothing predicts the first token.
      const auto first = work.mask.begin() + static_cast<std::ptrdiff_t>(before);
      if (std::find(first + 1, work.mask.end(), 1) == work.mask.end()) {
        work.ids.resize(before);
        work.mask.resize(before);
        work.untrained.push_back(where);
        return;
      }
    }
    const std::size_t length = work.ids.size() - before;
    MOESH_CHECK(length <= std::numeric_limits<std::int32_t>::max(), ErrorKind::data, where, length,
                " tokens are more than the index can hold: split the document");
    work.lengths.push_back(static_cast<std::int32_t>(length));
  }

  void add_chat(Encoded& work, const std::string& line, EncodeBuffers& buffers) const {
    const RenderedChat chat = chats_->render(line);
    std::vector<tokenizer::ByteRange> spans;
    const std::size_t before = work.ids.size();
    tokenizer_.encode(chat.text, /*with_template=*/false, buffers, work.ids, &spans);
    add_mask(chat, tokenizer_, std::span<const std::int32_t>(work.ids).subspan(before), spans,
             options_.chats.end_of_turn, work.mask);
  }

  const TokenizeOptions& options_;
  const Tokenizer& tokenizer_;
  const std::optional<ChatTemplate>& chats_;
  tokenizer::TokenId end_of_document_ = tokenizer::kNoToken;
};

// Encodes all batches of a round; the first error is thrown, that of the earliest batch.
void encode_round(const Encoder& encoder, std::vector<Encoded>& round,
                  std::vector<EncodeBuffers>& buffers) {
  std::atomic<std::size_t> next = 0;
  std::vector<std::exception_ptr> failed(round.size());
  const auto work = [&](EncodeBuffers& own) {
    for (std::size_t i; (i = next++) < round.size();) try {
        encoder.run(round[i], own);
      } catch (...) {
        failed[i] = std::current_exception();
      }
  };
  {
    std::vector<std::jthread> threads;
    for (std::size_t t = 1; t < std::min(buffers.size(), round.size()); ++t)
      threads.emplace_back([&, t] { work(buffers[t]); });
    work(buffers[0]);
  }
  for (const auto& error : failed)
    if (error) std::rethrow_exception(error);
}

// The number of batches of a round; fewer if their texts are large: two rounds are in memory at a
// time.
std::vector<Encoded> read_round(TextReader& reader, std::size_t count) {
  constexpr std::size_t kEnoughBytes = std::size_t{256} << 20;
  std::vector<Encoded> round;
  for (std::size_t bytes = 0; round.size() < count && bytes < kEnoughBytes;) {
    auto batch = reader.next();
    if (!batch) break;
    for (const std::string& text : batch->texts) bytes += text.size();
    round.push_back({.batch = std::move(*batch)});
  }
  return round;
}

// Says those of a list that are among the first ten of all.
template <class F>
void warn(std::int64_t num_before, const std::vector<std::string>& list, const F& say) {
  for (const std::string& one : list)
    if (num_before++ < kShownErrors) say(one);
}

// Everything that the ids depend on.
std::string describe_work(const TokenizeOptions& o, const std::vector<TextFile>& files,
                          const std::string& tokenizer_sum,
                          const std::optional<ChatTemplate>& chats) {
  std::string text = detail::concat("tokenizer ", tokenizer_sum, ", field ", o.field, ", end ",
                                    o.end_of_document, ", template ", o.with_template);
  if (chats) text += detail::concat(", chats ", chats->facts, " ", o.chats.end_of_turn);
  for (const TextFile& file : files)
    text +=
        detail::concat("; ", file.path, " ", file.is_jsonl, " ", file.size, " ", file.changed_ns);
  return formats::checksum_text(formats::hash_block(text));
}

class TokenizeProgress {
 public:
  TokenizeProgress(bool shown, std::uint64_t total)
      : shown_(shown), is_terminal_(::isatty(STDERR_FILENO) != 0), total_(total) {}
  ~TokenizeProgress() {
    if (drawn_) std::fputc('\n', stderr);
  }

  void show(std::uint64_t num_bytes, const TokenOutput::WrittenState& state) {
    if (!shown_ || seconds_since(last_) < (is_terminal_ ? 0.2 : 10)) return;
    last_ = Clock::now();
    if (first_bytes_ == kNone) first_bytes_ = num_bytes;
    const double seconds = seconds_since(start_);
    const double rate = static_cast<double>(num_bytes - first_bytes_) / std::max(seconds, 1e-3);
    const std::string counts = detail::concat(with_commas(state.num_documents), " documents, ",
                                              with_commas(state.num_tokens), " tokens");
    const int percent =
        total_ == 0 ? 0 : static_cast<int>(100 * std::min(num_bytes, total_) / total_);
    const long left = rate > 0 && total_ > num_bytes
                          ? static_cast<long>(static_cast<double>(total_ - num_bytes) / rate)
                          : 0;
    if (!is_terminal_)
      return log_info("tokenize: ", percent, " %, ", counts, ", ", static_cast<long>(rate / 1e6),
                      " MB/s, ", left, " s left");
    constexpr const char* kBar = "#########################";
    std::fprintf(stderr, "\r[%-25.*s] %3d %%  %s  %.1f MB/s  %ld s left \033[K", percent / 4, kBar,
                 percent, counts.c_str(), rate / 1e6, left);
    drawn_ = true;
  }

 private:
  static constexpr std::uint64_t kNone = ~std::uint64_t{0};
  bool shown_, is_terminal_, drawn_ = false;
  std::uint64_t total_, first_bytes_ = kNone;
  Clock::time_point start_ = Clock::now(), last_ = Clock::now();
};

}  // namespace

void TokenizeOptions::validate() const {
  MOESH_CHECK(!tokenizer.empty(), ErrorKind::config,
              "name the tokenizer: --tokenizer FILE_OR_FOLDER");
  MOESH_CHECK(!out.empty() && !out.ends_with('/'), ErrorKind::config,
              "name the output: --out PREFIX");
  MOESH_CHECK(!inputs.empty(), ErrorKind::config, "name the inputs: files, folders, globs, or -");
  MOESH_CHECK(std::count(inputs.begin(), inputs.end(), "-") <= 1, ErrorKind::config,
              "standard input (-) is named twice, and ends when it is read once; name it once");
  MOESH_CHECK(format == "auto" || format == "text" || format == "jsonl", ErrorKind::config,
              "--format is '", format, "'; it takes auto, text or jsonl");
  chats.validate();
  MOESH_CHECK(num_threads <= kMaxThreads, ErrorKind::config, "--threads is ", num_threads,
              "; it takes 1 to ", kMaxThreads, ", and this machine has ",
              std::thread::hardware_concurrency(), " cores");
}

TokenizeSummary tokenize(const TokenizeOptions& options) {
  options.validate();
  const auto start = Clock::now();
  const std::filesystem::path file = tokenizer::file_of(options.tokenizer);
  const std::string json = formats::read_file(file.string(), ErrorKind::data);
  const Tokenizer tokenizer(json, file.string());
  const std::vector<TextFile> files = find_text_files(options.inputs, options.format);
  ChatOptions chat_options = options.chats;
  chat_options.tokenizer = options.tokenizer;
  const auto chats = find_chat_template(chat_options, files, options.field);
  MOESH_CHECK(
      !chats || !options.with_template, ErrorKind::config,
      "--with-template is what the tokenizer puts around a text, and these are chats, whose "
      "template writes all of it; leave it out");
  const Encoder encoder(options, tokenizer, chats);

  // Megatron's own rule, so that its tools take the same type.
  const auto type =
      tokenizer.vocab_size() < 65500 ? formats::IdType::uint16 : formats::IdType::int32;
  const std::string tokenizer_sum = formats::checksum_text(formats::hash_block(json));
  TokenOutput output(options.out, type, describe_work(options, files, tokenizer_sum, chats),
                     options.skip_errors, chats.has_value());
  const std::int64_t went_on_from = output.state().num_documents;
  const bool reads_pipe =
      std::any_of(files.begin(), files.end(), [](const TextFile& f) { return f.path == "-"; });
  MOESH_CHECK(!reads_pipe || output.state().is_complete || went_on_from == 0, ErrorKind::config,
              options.out, ": ", went_on_from,
              " documents were written by a run that was stopped, and moesh cannot tell whether "
              "standard input is the same again; remove ",
              options.out, ".*.partial and ", options.out, ".progress* to start again");

  if (!output.state().is_complete) {
    const int cores = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
    const int num_threads = options.num_threads > 0 ? options.num_threads : cores;
    std::vector<EncodeBuffers> buffers(static_cast<std::size_t>(num_threads));
    const std::size_t per_round = buffers.size() * 8;
    TextReader reader(files, output.state().place);
    TokenizeProgress progress(
        options.show_progress,
        std::accumulate(files.begin(), files.end(), std::uint64_t{0},
                        [](auto sum, const TextFile& f) { return sum + f.size; }));
    auto last_save = Clock::now();
    const auto read = [&] { return read_round(reader, per_round); };
    std::vector<Encoded> round = read();
    while (!round.empty()) {
      interruption_point();
      auto next = std::async(std::launch::async, read);
      encode_round(encoder, round, buffers);
      for (const Encoded& done : round) {
        output.add(done.ids, done.lengths, done.mask);
        warn(output.state().num_skipped, done.errors,
             [](const std::string& error) { log_warn("skipped ", error); });
        warn(output.state().num_untrained, done.untrained, [](const std::string& where) {
          log_warn("left out ", where, "no token of this conversation is trained on");
        });
        output.count(done.num_empty, std::ssize(done.errors), std::ssize(done.untrained));
      }
      const TextBatch& last = round.back().batch;
      progress.show(last.num_bytes, output.state());
      if (seconds_since(last_save) >= options.save_interval) {
        output.save(last.end);
        last_save = Clock::now();
      }
      round = next.get();
    }
    const TokenOutput::WrittenState& state = output.state();
    MOESH_CHECK(state.num_documents > 0 || state.num_untrained == 0, ErrorKind::data,
                "none of the ", state.num_untrained,
                " conversations has a token that is trained on; are there turns of the roles that "
                "--roles names, and does the template write them?");
    MOESH_CHECK(state.num_documents > 0, ErrorKind::data, "the inputs hold no text");
    std::map<std::string, std::string> facts{{"tokenizer", file.string()},
                                             {"tokenizer_checksum", tokenizer_sum},
                                             {"vocab_size", std::to_string(tokenizer.vocab_size())},
                                             {"documents", std::to_string(state.num_documents)},
                                             {"tokens", std::to_string(state.num_tokens)},
                                             {"end_of_document", options.end_of_document}};
    if (chats) {
      facts["trained_tokens"] = std::to_string(state.num_trained);
      facts["chats"] = chats->facts;
    }
    output.finish(std::move(facts));
  }
  TokenizeSummary summary{output.state()};
  summary.has_mask = chats.has_value();
  summary.num_files = std::ssize(files);
  for (const TextFile& f : files) summary.num_bytes += static_cast<std::int64_t>(f.size);
  summary.went_on_from = went_on_from;
  summary.seconds = seconds_since(start);
  summary.id_type = formats::to_string(type);
  return summary;
}

void check_token_files(const std::string& prefix) {
  const std::string path = prefix + ".moesh.json";
  const auto manifest = formats::parse_manifest(formats::read_file(path, ErrorKind::data), path);
  const auto folder = std::filesystem::absolute(prefix).parent_path().string();
  for (const formats::ManifestFile& file : manifest.files) formats::check_file(folder, file);
}

std::string find_end_of_document(const std::string& tokenizer) {
  const auto path = tokenizer::file_of(tokenizer).parent_path() / "tokenizer_config.json";
  if (!formats::exists(path)) return "";
  const auto json = formats::read_json(path.string());
  const auto* token = json.find("eos_token");
  if (!token || token->is_null()) return "";
  if (const auto* content = token->find("content")) return content->as_text("eos_token.content");
  return token->as_text("eos_token");
}

}  // namespace moesh::data
