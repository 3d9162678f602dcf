#include "moesh/cli/memory_errors.h"

#include <sys/resource.h>
#include <unistd.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <charconv>
#include <new>

#include "moesh/base/error.h"
#include "moesh/comm/launch.h"
#include "moesh/comm/rank_status.h"
#include "moesh/config/options.h"
#include "moesh/estimate/estimate.h"
#include "moesh/kernels/memory.h"
#include "moesh/train/metrics/record.h"

namespace moesh::cli {
namespace {

// The largest sizes that the user has set, each with its origin.
std::string sizes_that_were_set(const config::Config& config) {
  std::vector<std::pair<std::int64_t, std::string>> sizes;
  for (const auto& [name, origin] : config.origins) {
    if (!name.starts_with("model.") && !name.starts_with("data.")) continue;
    const config::Option* option = config::find_option(name);
    const auto value = option ? option->get(config) : config::model_value(config, name);
    const auto* number = value ? std::get_if<std::int64_t>(&*value) : nullptr;
    if (number && name != "data.seed") sizes.emplace_back(*number, name);
  }
  std::sort(sizes.rbegin(), sizes.rend());
  std::string text;
  for (std::size_t i = 0; i < std::min<std::size_t>(sizes.size(), 3); ++i)
    text += (i ? ", " : "") + config::describe_option(config, sizes[i].second);
  return text.empty() ? config::describe_option(config, "model.size") : text;
}

// The size that LibTorch says was requested; else what the run needs by its estimate, where there
// is one.
std::string bytes_asked(const std::string& said, const config::Config& config) {
  constexpr std::string_view kBefore = "tried to allocate ";
  if (const auto at = said.find(kBefore); at != std::string::npos) {
    std::uint64_t bytes = 0;
    const char* first = said.data() + at + kBefore.size();
    if (std::from_chars(first, said.data() + said.size(), bytes).ec == std::errc())
      return detail::concat(bytes, " bytes were asked for at once");
  }
  try {
    const auto bytes = estimate::estimate(config).peak;
    if (bytes > 0) return detail::concat("a rank needs about ", bytes, " bytes");
  } catch (const std::bad_alloc&) {
    return "there is none left";
  } catch (const std::exception&) {
    // The sizes are too large even for numbers.
  }
  return detail::concat("more than ", std::numeric_limits<std::int64_t>::max(),
                        " bytes were asked for");
}

struct Room {
  std::int64_t bytes;
  const char* whose;
};

// The memory of the machine, or the limit of this process if that is less.
Room memory_there() {
  const std::int64_t machine = std::int64_t{::sysconf(_SC_PHYS_PAGES)} * ::sysconf(_SC_PAGESIZE);
  rlimit limit{};
  if (::getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur < static_cast<rlim_t>(machine))
    return {static_cast<std::int64_t>(limit.rlim_cur), "this process may have (ulimit -v) "};
  return {machine, "this machine has "};
}

// The most that a process holds through the whole run. A launched one has some ranks, one after the
// other; by itself it has all of them.
double state_of_process(const config::Config& config) {
  const MeshShape shape = mesh_shape(config);
  const int num_ranks = shape.num_ranks(),
            each = std::max(1, num_ranks / std::max(1, comm::num_launched_processes()));
  const auto state = estimate::state_of_ranks(config);
  double most = 0;
  for (int first = 0; first < num_ranks; first += each) {
    double sum = 0;
    for (int rank = first; rank < std::min(first + each, num_ranks); ++rank)
      sum += static_cast<double>(state[static_cast<size_t>(shape.coordinate(rank, pp))].total());
    most = std::max(most, sum);
  }
  return most;
}

[[noreturn]] void throw_out_of_memory(const std::string& asked, const config::Config& config) {
  throw Error(ErrorKind::config,
              detail::concat("not enough memory: ", asked, ", and ", memory_there().whose,
                             memory_there().bytes, "; ", sizes_that_were_set(config),
                             ". Lower such sizes, or split over more ranks; moesh estimate tells "
                             "what a rank needs"));
}

}  // namespace

void check_fits(const config::Config& config) {
  if (config.training.device != "cpu") return;
  const double bytes = state_of_process(config);
  if (bytes > static_cast<double>(memory_there().bytes))
    throw_out_of_memory(
        detail::concat("weights, gradients and the state of the optimizer have ",
                       static_cast<std::int64_t>(std::min(bytes, 9e18)), " bytes in this process"),
        config);
}

void naming_sizes(const config::Config& config, const std::function<void()>& f) {
  try {
    f();
  } catch (const std::exception& e) {
    const auto fault = std::current_exception();
    if (comm::is_about_memory(fault))
      throw_out_of_memory(bytes_asked(comm::text_of(fault), config), config);
    if (dynamic_cast<const c10::Error*>(&e))
      throw Error(ErrorKind::internal, "LibTorch: " + comm::text_of(fault));
    throw;
  }
}

using namespace config;
using namespace train;
namespace {

// Bytes of the rank that holds the most, at its peak; what cannot be estimated may still be
// trained.
std::optional<std::int64_t> expected_memory(const Config& config) {
  try {
    return estimate::estimate(config).peak;
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

}  // namespace

RunSummary train_in_memory(const Config& config, CallerInfo caller, const data::Dataset* dataset) {
  // Under a launcher the ranks are spread over the processes.
  const int processes = comm::num_launched_processes();
  if (processes > 0 && mesh_shape(config).num_ranks() % processes != 0) validate(config, processes);
  if (config.training.device == "cpu") kernels::keep_freed_memory();
  RunSummary summary;
  naming_sizes(config, [&] {
    check_fits(config);
    caller.estimated_memory = expected_memory(config);
    if (config.training.device == "cpu") caller.memory_before_gib = peak_memory_gib("cpu");
    summary = dataset ? train::train(config, *dataset, caller) : train::train(config, caller);
  });
  return summary;
}

}  // namespace moesh::cli
