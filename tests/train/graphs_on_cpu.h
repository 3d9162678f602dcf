#pragma once
// Graphs where there are none: a replay runs what was recorded once more. As on a GPU, the host
// does not see what it writes: versions stay as they were.

#include <memory>
#include <vector>

#include "moesh/kernels/graph.h"
#include "moesh/models/model.h"

namespace moesh {

class GraphsOnCpu {
 public:
  kernels::Graphs graphs() {
    return {.refuses = [](c10::Device) { return std::string(); },
            .record =
                [this](const std::function<void()>& f, const kernels::Graph* beside) {
                  TORCH_CHECK_WITH(OutOfMemoryError, num_alive < most_alive,
                                   "no memory for a graph");
                  if (fails_late) {
                    note_all_copies_written();
                    TORCH_CHECK(false, "the capture has failed");
                  }
                  beside_others.push_back(beside != nullptr);
                  return std::make_unique<Again>(*this, f);
                }};
  }

  models::Model* model = nullptr;  // whose versions stay
  int most_alive = 1000;           // of more, recording fails
  bool fails_late = false;         // after the host has gone through all of the step
  int num_alive = 0, largest_alive = 0;
  std::vector<bool> beside_others;  // of each that was recorded
  int num_replays = 0;
  bool does_it_twice = false;  // a mistake to be found

 private:
  // As the host does in a step that the device does not run.
  void note_all_copies_written() const {
    model->each_param([](Stored& w, bool) { raw::note_copy_written(w); });
  }

  struct Again : kernels::Graph {
    Again(GraphsOnCpu& all, std::function<void()> f) : all_(all), f_(std::move(f)) {
      all_.largest_alive = std::max(all_.largest_alive, ++all_.num_alive);
    }
    ~Again() override { --all_.num_alive; }
    void replay() override {
      ++all_.num_replays;
      std::vector<std::pair<std::uint32_t, std::int64_t>> before;
      const auto each = [&](const auto& g) {
        if (all_.model) all_.model->each_param([&](Stored& w, bool) { g(w); });
      };
      each([&](Stored& w) {
        before.emplace_back(w.value._version(), w.copy ? w.copy->version : 0);
      });
      f_();
      if (all_.does_it_twice) f_();
      std::size_t i = 0;
      each([&](Stored& w) {
        const auto [version, of_copy] = before[i++];
        w.value.unsafeGetTensorImpl()->set_version_counter(c10::VariableVersion(version));
        if (w.copy) w.copy->version = of_copy;
      });
    }

   private:
    GraphsOnCpu& all_;
    std::function<void()> f_;
  };
};

}  // namespace moesh
