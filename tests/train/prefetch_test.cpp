// Batches come in the order of their positions, one step ahead, and a fault of the reader comes to
// the step that wants its batch.

#include "moesh/train/prefetch.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "moesh/comm/launch.h"
#include "moesh/config/merge.h"
#include "moesh/data/dataset.h"
#include "moesh/fsdp/fsdp.h"
#include "moesh/train/build.h"
#include "tests/spmd/device.h"
#include "tests/support.h"

namespace moesh::train {
namespace {

TEST(Prefetch, GivesItemsInTheOrderOfTheirPositionsOneAhead) {
  std::vector<std::int64_t> made;  // by the thread, which is over whenever it is read here
  Prefetch<std::int64_t> next([&](std::int64_t position) {
    made.push_back(position);
    return 10 * position;
  });
  next.start(0);
  for (std::int64_t i = 0; i < 20; ++i) {
    EXPECT_EQ(next.take(), 10 * i);
    EXPECT_EQ(made.size(), static_cast<size_t>(i + 1)) << "no more than one ahead, each once";
    next.start(i + 1);
  }
  EXPECT_EQ(next.take(), 200);
}

TEST(Prefetch, MakesAnItemWhileTheCallerDoesOtherThings) {
  std::promise<int> from_caller;
  Prefetch<int> next([&](std::int64_t) { return from_caller.get_future().get(); });
  next.start(0);  // if this waited for the item, nobody would come to the next line
  from_caller.set_value(7);
  EXPECT_EQ(next.take(), 7);
}

TEST(Prefetch, ThrowsWhereItsItemIsTakenAndGoesOn) {
  Prefetch<int> next([](std::int64_t position) {
    MOESH_CHECK(position != 1, ErrorKind::data, "sample ", position, " is damaged");
    return static_cast<int>(position);
  });
  next.start(0);
  EXPECT_EQ(next.take(), 0);
  next.start(1);
  EXPECT_EQ(error_of([&] { next.take(); }, ErrorKind::data), "sample 1 is damaged");
  next.start(2);
  EXPECT_EQ(next.take(), 2);
}

TEST(Prefetch, WaitsForItsThreadWhenItEnds) {
  std::atomic<bool> is_over = false;
  {
    Prefetch<int> next([&](std::int64_t) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      is_over = true;
      return 0;
    });
    next.start(0);
  }
  EXPECT_TRUE(is_over);
}

TEST(Prefetch, RefusesTwoAtATimeAndNone) {
  Prefetch<int> next([](std::int64_t) { return 0; });
  expect_parts(error_of([&] { next.take(); }, ErrorKind::internal), {"call start()"});
  next.start(0);
  expect_parts(error_of([&] { next.start(5); }, ErrorKind::internal), {"position 5", "not taken"});
}

// Sample i is i, i + 1, ...; from a sample on nothing can be read.
class Damaged : public data::Dataset {
 public:
  explicit Damaged(std::int64_t first_bad) : first_bad_(first_bad) {}
  data::Sample get(std::int64_t index) const override {
    MOESH_CHECK(index < first_bad_, ErrorKind::data, "sample ", index, " cannot be read");
    data::Sample sample;
    for (std::int64_t t = 0; t <= sequence_length(); ++t)
      sample.tokens.push_back(static_cast<data::TokenId>(index + t)), sample.documents.push_back(0);
    return sample;
  }
  std::int64_t sequence_length() const override { return 4; }
  std::int64_t vocab_size() const override { return 1000; }
  std::string describe() const override { return "damaged"; }

 private:
  std::int64_t first_bad_;
};

// As in the loop: every rank prefetches its own batches and meets the others in every step. The
// rank whose sample is damaged throws; the others do not wait for it.
TEST(Prefetch, AReaderThatFailsOnOneRankEndsAllWithItsMessage) {
  const Config config = config::load_config({"--mesh=dp_shard=2", "--data.batch_size=2"});
  const Damaged dataset(10);
  int num_steps = 0;  // of rank 1
  const std::string text = error_of(
      [&] {
        comm::launch(
            2,
            [&](comm::Group& world) {
              const Mesh mesh(world, mesh_shape(config));
              Prefetch<std::vector<models::MicroBatch>> next(
                  [&](std::int64_t p) { return host_batches(config, dataset, mesh)(p); });
              next.start(0);
              for (std::int64_t step = 0; step < 5; ++step) {
                const auto batches = next.take();
                next.start(4 * (step + 1));
                EXPECT_EQ(batches.at(0).input_ids_BL[0][0].item<std::int64_t>(),
                          4 * step + 2 * world.rank());
                world.all_reduce(at::ones({1}));
                if (world.rank() == 1) ++num_steps;
              }
            },
            test_options());
      },
      ErrorKind::data);
  expect_parts(text, {"sample 10 cannot be read"});  // of rank 1, in the third step
  EXPECT_EQ(num_steps, 2);
}

}  // namespace
}  // namespace moesh::train
