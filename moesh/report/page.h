#pragma once
// The report: one HTML file with everything in it.

#include <string>
#include <vector>

#include "moesh/formats/json.h"
#include "moesh/report/run_data.h"

namespace moesh::report {

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

}  // namespace moesh::report
