#include "moesh/cli/memory_errors.h"

#include <ATen/ATen.h>

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

}  // namespace
}  // namespace moesh::cli
