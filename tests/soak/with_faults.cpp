// Linked with apps/moesh.cpp: the command with faults.
//   MOESH_FAULTS     of the file system, see FaultyFileSystem::parse
//   MOESH_SIGNAL_AT  "B1.2 3 9 1": MPI process 1 sends itself signal 9 when it begins, for the
//                    third time, the backward of stage 1 for micro-batch 2; any scope of
//                    RECORD_USER_SCOPE will do
#include <ATen/record_function.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <sstream>
#include <string>

#include "moesh/base/error.h"
#include "tests/faulty_file_system.h"

namespace {

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

struct SignalAt {
  std::string scope;
  int number = 0, signal = 0;
  std::atomic<int> num_seen = 0;
};
SignalAt& signal_at() {
  static SignalAt at;
  return at;
}

std::unique_ptr<at::ObserverContext> on_scope(const at::RecordFunction& scope) {
  auto& at = signal_at();
  if (scope.name() == at.scope && ++at.num_seen == at.number) std::raise(at.signal);
  return nullptr;
}

bool watch_scopes(const std::string& text) {
  if (text.empty()) return false;
  auto& at = signal_at();
  std::istringstream words(text);
  std::string process;
  words >> at.scope >> at.number >> at.signal >> process;
  MOESH_CHECK(!words.fail(), moesh::ErrorKind::config, "MOESH_SIGNAL_AT is '", text,
              "', not SCOPE NUMBER SIGNAL PROCESS");
  if (variable("OMPI_COMM_WORLD_RANK") != process) return false;
  at::addGlobalCallback(
      at::RecordFunctionCallback(&on_scope).scopes({at::RecordScope::USER_SCOPE}));
  return true;
}

const moesh::WithFaults faults(variable("MOESH_FAULTS"));
const bool is_watched = watch_scopes(variable("MOESH_SIGNAL_AT"));

}  // namespace
