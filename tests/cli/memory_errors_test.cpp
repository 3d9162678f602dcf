#include "moesh/cli/memory_errors.h"

#include <ATen/ATen.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <fstream>

#include "moesh/cli/program.h"
#include "moesh/config/merge.h"
#include "tests/support.h"

namespace moesh::cli {
namespace {

const config::Config kConfig = config::load_config({"--data.batch_size=77", "--model.dim=48"});

TEST(MemoryErrors, HaveTheSizesTheBytesAskedForAndTheBytesThere) {
  const auto text =
      error_of([] { naming_sizes(kConfig, [] { at::empty({std::int64_t{1} << 58}, at::kByte); }); },
               ErrorKind::config);
  expect_parts(text, {"288230376151711744 bytes were asked for", "this machine has",
                      "data.batch_size is 77 (", "model.dim is 48 ("});
  EXPECT_EQ(text.find("frame #"), std::string::npos) << text;
  expect_parts(
      error_of([] { naming_sizes(kConfig, [] { throw std::bad_alloc(); }); }, ErrorKind::config),
      {"a rank needs about", "this machine has", "data.batch_size is 77"});
}

// With pp ranks hold different stages: what counts is their sum.
TEST(MemoryErrors, AddUpTheStagesOfAPipeline) {
  const double there =
      static_cast<double>(::sysconf(_SC_PHYS_PAGES)) * static_cast<double>(::sysconf(_SC_PAGESIZE));
  const auto with = [&](double part, const std::string& layers) {
    // 16 layers, 8 experts with three matrices of 32 x ffn; weight, gradient and two moments.
    const auto ffn = static_cast<std::int64_t>(part * there / (16 * 8 * 3 * 32 * 16.0)) / 8 * 8;
    return config::load_config({"--model=qwen3_moe:tiny", "--model.num_layers=16",
                                "--model.num_experts=8", "--model.dim=32",
                                "--model.moe_ffn=" + std::to_string(ffn), "--mesh=pp=2",
                                "--training.gradient_accumulation_steps=2",
                                "--parallelism.pipeline_parallel_layers_per_stage=" + layers});
  };
  EXPECT_NO_THROW(check_fits(with(0.8, "15,1")));
  expect_parts(error_of([&] { check_fits(with(1.4, "1,15")); }, ErrorKind::config),
               {"weights, gradients and the state of the optimizer", "this machine has"});
}

// A text that has the word in it is not about memory for that.
TEST(MemoryErrors, AreNotWhateverSpeaksOfMemory) {
  const auto text = error_of(
      [] {
        naming_sizes(kConfig, [] {
          TORCH_CHECK(false, "unsupported memory format: cannot allocate a name for it");
        });
      },
      ErrorKind::internal);
  expect_parts(text, {"LibTorch: unsupported memory format"});
  EXPECT_EQ(text.find("this machine has"), std::string::npos) << text;
  EXPECT_EQ(text.find("Exception raised"), std::string::npos) << text;
}

// This process may have 16 MiB more than it has.
void leave_no_memory() {
  std::size_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  const rlim_t most = pages * static_cast<rlim_t>(::sysconf(_SC_PAGESIZE)) + (16 << 20);
  const rlimit limit{.rlim_cur = most, .rlim_max = most};
  ::setrlimit(RLIMIT_AS, &limit);
  end_with_sentences();
}
void write_to(void* place) { *static_cast<volatile char*>(place) = 1; }

// A library that takes the null that it was given is told as lack of memory. A fault that has
// nothing to do with memory is not, however little is left.
TEST(MemoryErrors, AreNotEveryFaultUnderALimit) {
  EXPECT_EXIT((leave_no_memory(), write_to(std::malloc(std::size_t{1} << 30))),
              testing::ExitedWithCode(2), "there is no memory left.*ulimit -v");
  EXPECT_EXIT((leave_no_memory(), errno = 0, write_to(nullptr)), testing::KilledBySignal(SIGSEGV),
              "^$");
  EXPECT_EXIT((leave_no_memory(), errno = ENOMEM, write_to(reinterpret_cast<void*>(1 << 20))),
              testing::KilledBySignal(SIGSEGV), "^$");
  EXPECT_EXIT((leave_no_memory(), errno = ENOMEM, std::raise(SIGSEGV)),
              testing::KilledBySignal(SIGSEGV), "^$");
}

}  // namespace
}  // namespace moesh::cli
