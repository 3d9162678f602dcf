#pragma once
// The page of `moesh report`: what it reads from runs, the page, and its server.

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "moesh/formats/json.h"

namespace moesh::report {

// A run as its report needs it: metrics.jsonl by column, read on as the run goes on.

/// The tokens of every expert at one step, layer by layer.
struct Frame {
  std::int64_t step = 0;
  std::vector<std::uint32_t> counts;  // layers x experts
};

class RunData {
 public:
  /// Throws Error (config) where the folder has no metrics.jsonl.
  explicit RunData(const std::filesystem::path& folder);

  /// Reads the lines that have come since the last call. A file that was replaced (a run that goes
  /// on from a checkpoint) is read from its beginning: then `generation` is another.
  void update();

  const std::string& name() const { return name_; }
  std::int64_t generation() const { return generation_; }
  /// Records so far. Each column has this many numbers; NaN where a record has none. A list or an
  /// object of a record has a column for each of its numbers: "sections.data", "expert_entropy.3".
  std::size_t size() const { return size_; }
  const std::map<std::string, std::vector<double>>& columns() const { return columns_; }
  /// The recorded ones, or an even choice of them if a page cannot hold all.
  const std::vector<Frame>& frames() const { return frames_; }
  std::size_t num_layers() const { return num_layers_; }
  std::size_t num_experts() const { return num_experts_; }
  /// The lines of starts.jsonl.
  const formats::JsonList& starts() const { return starts_; }

 private:
  friend void tell_apart(std::vector<RunData>& runs);
  void clear();
  void read_starts();
  void add(const std::string& line);
  void add_entry(std::int64_t step, const std::string& key, const formats::JsonValue& value);
  void add_numbers(const std::string& name, const formats::JsonValue& value);
  void set(const std::string& name, double value);
  void add_frame(std::int64_t step, const formats::JsonValue& counts);

  std::filesystem::path folder_;
  std::string name_;
  std::int64_t generation_ = 0;
  std::uint64_t offset_ = 0;  // in metrics.jsonl
  std::uint64_t file_id_ = 0;
  std::size_t size_ = 0;
  std::map<std::string, std::vector<double>> columns_;
  std::vector<Frame> frames_;
  std::size_t num_layers_ = 0, num_experts_ = 0;
  std::size_t stride_ = 1, num_counted_ = 0;  // every stride-th record of counts is a frame
  formats::JsonList starts_;
};

/// Gives runs that are called the same (a/outputs, b/outputs) names of their own.
void tell_apart(std::vector<RunData>& runs);

// The report: one HTML file with everything in it.

/// The part of a run that a page has already.
struct PageState {
  std::int64_t generation = -1;
  std::size_t num_records = 0;
  std::int64_t last_frame = 0;  // its step
};

/// The result of `moesh verify --json`.
struct VerifyResult {
  std::string name;
  formats::JsonValue result;
};

/// The runs as JSON; of one of which something is known, what has come since.
std::string runs_json(const std::vector<RunData>& runs, const std::vector<PageState>& known = {});

/// The page. `live_ms` above 0: it asks the server that it came from for more, so often.
/// Throws Error (config) where moesh was built without dygraphs.
std::string page(const std::vector<RunData>& runs, const std::vector<VerifyResult>& verified,
                 int live_ms = 0);

/// The result of `moesh verify --json`, or an Error (config) that names the file.
VerifyResult read_verify(const std::string& path);

// Texts that are compiled into the program; empty where dygraphs was not there.
extern const char* const kPageHtml;
extern const char* const kPageCss;
extern const char* const kPageJs;
extern const char* const kDygraphsJs;
extern const char* const kDygraphsCss;
extern const char* const kDygraphsLicence;

// The report of a run that is still training, for a browser on this machine.

/// Answers on 127.0.0.1 until `stop` is set; port 0: any that is free. `ready` gets the port.
/// Throws Error (config) where the port cannot be had.
void serve(std::vector<RunData> runs, const std::vector<VerifyResult>& verified, int port,
           const std::atomic<bool>& stop, const std::function<void(int port)>& ready);

/// The answer to a request, with its header: "GET /data?known=1.20.20 HTTP/1.1", then its
/// headers. A host that is not this machine by its number or as localhost is refused, so that no
/// other page of the browser can read the run.
std::string answer(const std::string& request, std::vector<RunData>& runs,
                   const std::vector<VerifyResult>& verified);

}  // namespace moesh::report
