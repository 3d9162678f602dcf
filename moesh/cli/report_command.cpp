#include <atomic>
#include <csignal>
#include <cstdio>
#include <filesystem>

#include "moesh/base/error.h"
#include "moesh/base/text.h"
#include "moesh/cli/command_line.h"
#include "moesh/cli/commands.h"
#include "moesh/report/page.h"

namespace moesh::cli {
namespace {

std::atomic<bool> stopped{false};

int port_of(const std::string& text) {
  const auto port = number_of<int>(text);
  MOESH_CHECK(port && *port >= 0 && *port < 65536, ErrorKind::config, "--serve is '", text,
              "'; it takes a port, 1 to 65535, or 0 for any that is free");
  return *port;
}

void serve_until_stopped(std::vector<report::RunData> runs,
                         const std::vector<report::VerifyResult>& verified, int port) {
  for (const int signal : {SIGINT, SIGTERM}) std::signal(signal, [](int) { stopped = true; });
  report::serve(std::move(runs), verified, port, stopped, [](int actual) {
    std::printf("http://127.0.0.1:%d follows the runs; Ctrl-C ends it\n", actual);
    std::fflush(stdout);
  });
}

}  // namespace

int run_report(const Arguments& given) {
  const auto out = given.text("--out"), port = given.text("--serve");
  const char* usage = "moesh report RUN... [FILE.json...] [--out FILE | --serve PORT]";
  MOESH_CHECK(!given.rest().empty(), ErrorKind::config,
              "name the folders of the runs to report; usage: ", usage);
  std::vector<report::RunData> runs;
  std::vector<report::VerifyResult> verified;
  for (const std::string& arg : given.rest()) {
    std::error_code none;  // a name that is too long, say, is that of no folder
    if (arg.ends_with(".json") && !std::filesystem::is_directory(arg, none))
      verified.push_back(report::read_verify(arg));
    else
      runs.emplace_back(arg);
  }
  MOESH_CHECK(!runs.empty(), ErrorKind::config,
              "no folder of a run is given beside the results of verify; usage: ", usage);
  tell_apart(runs);
  MOESH_CHECK(!out || !port, ErrorKind::config, "--out ", out.value_or(""), " and --serve ",
              port.value_or(""), " are two ways to show a report; leave one of them out");
  if (port) {
    serve_until_stopped(std::move(runs), verified, port_of(*port));
    return 0;
  }
  const std::string path = out.value_or("report.html"), text = report::page(runs, verified);
  NamedOutput("--out", path).write(text);
  std::printf("%s: %zu run%s, %.1f MB; open it in a browser\n", printable(path).c_str(),
              runs.size(), runs.size() == 1 ? "" : "s", static_cast<double>(text.size()) / 1e6);
  return 0;
}

}  // namespace moesh::cli
