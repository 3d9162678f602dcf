// What `verify --golden` is asked for besides the file: it is so, or it is refused.

#include "moesh/verify/golden.h"

#include <ATen/ATen.h>

#include <random>

#include "moesh/models/disk.h"
#include "moesh/verify/compare.h"
#include "tests/checkpoint/support.h"
#include "tests/support.h"

namespace moesh::verify {
namespace {

class GoldenSettings : public testing::Test {
 protected:
  GoldenSettings() {
    std::ofstream(folder_.path() / "config.json")
        << models::on_disk(models::built_in("deepseek_v3", "tiny"))
               .config_json(formats::Dtype::f32);
    NamedTensors tensors;
    for (const char* name : {"input_ids", "labels"})
      tensors.tensors.emplace_back(name, at::zeros({4, 5}, at::kLong));
    write_tensors(file(), tensors);
  }
  std::string file() const { return folder_.path() / "golden.safetensors"; }
  std::string folder() const { return folder_.path(); }
  std::string error(Args args, ErrorKind kind) const {
    args.push_back("--checkpoint.initial_load=" + folder_.path().string());
    return error_of([&] { read_golden(file(), config::read_arguments(args)); }, kind);
  }
  void expect_refused(const Args& args, std::vector<std::string> parts) const {
    parts.emplace_back("(command line)");
    parts.emplace_back("leave it out");
    expect_parts(error(args, ErrorKind::config), parts);
  }
  // The file has no results: this is said after the settings were looked at.
  void expect_accepted(const Args& args) const {
    expect_parts(error(args, ErrorKind::data), {"has no tensor 'loss'"});
  }

 private:
  TemporaryFolder folder_;
};

TEST_F(GoldenSettings, AFileWithOtherTokensIsRefused) {
  const auto refused = [&](const at::Tensor& ids, const at::Tensor& labels,
                           const std::string& part) {
    NamedTensors tensors;
    tensors.tensors = {{"input_ids", ids}, {"labels", labels}};
    write_tensors(file(), tensors);
    expect_parts(error({}, ErrorKind::data), {"golden.safetensors", part});
  };
  const at::Tensor ids = at::zeros({4, 5}, at::kLong);
  refused(ids.to(at::kFloat), ids, "whole numbers");
  refused(at::zeros({4, 0}, at::kLong), at::zeros({4, 0}, at::kLong), "at least one");
  refused(ids + 96, ids, "input_ids from 96 to 96");
  refused(ids - 1, ids, "input_ids from -1 to -1");
  refused(ids, ids - 7, "labels from -7 to -7");
  refused(ids, at::zeros({5, 4}, at::kLong), "both are [batch, length]");
}

// Bytes of the file are changed at random, most of them in its header: it is read, or refused.
TEST_F(GoldenSettings, DamagedFilesAreRefused) {
  const std::string whole = bytes_of(file());
  std::mt19937 random(5);
  int num_refused = 0;
  for (int trial = 0; trial < 3000; ++trial) {
    std::string bytes = whole;
    for (std::size_t n = 1 + random() % 3; n > 0; --n) {
      const std::size_t at =
          random() % (random() % 4 ? std::min<std::size_t>(200, bytes.size()) : bytes.size());
      switch (random() % 4) {
        case 0: bytes[at] = static_cast<char>(random()); break;
        case 1: bytes[at] = "0123456789,:[]{}\"-"[random() % 18]; break;
        case 2: bytes.erase(at, 1 + random() % 4); break;
        default: bytes.resize(at); break;
      }
      if (bytes.empty()) bytes = whole;
    }
    std::ofstream(file(), std::ios::binary) << bytes;
    try {
      read_golden(file(), config::read_arguments({"--checkpoint.initial_load=" + folder()}));
    } catch (const Error& e) {
      EXPECT_TRUE(e.kind() == ErrorKind::data || e.kind() == ErrorKind::config) << e.what();
      ++num_refused;
    }
  }
  EXPECT_EQ(num_refused, 3000);  // it never has the results
}

TEST_F(GoldenSettings, OfAnotherModelAreRefused) {
  expect_refused({"--model.top_k=5"}, {"model.top_k is 5", "config.json has 2"});
  expect_refused({"--model.num_experts=7"}, {"model.num_experts is 7", "config.json has 8"});
  expect_refused({"--model=mixtral:tiny"}, {"model.name is mixtral", "is of deepseek_v3"});
  expect_refused({"--model=deepseek_v3:debug"},
                 {"model.size is debug", "has model.vocab_size = 96, not 2048"});
  expect_parts(error({"--model.top_q=5"}, ErrorKind::config), {"--model.top_q", "--model.top_k"});
}

TEST_F(GoldenSettings, ThatTheFileFixesAreRefused) {
  expect_refused({"--data.sequence_length=9"}, {"data.sequence_length is 9", "has 5"});
  expect_refused({"--data.batch_size=3"}, {"data.batch_size is 3", "has 4"});
  expect_refused({"--data.batch_size=4", "--mesh=dp_shard=2"}, {"data.batch_size is 4", "has 2"});
  expect_refused({"--moe.z_loss_weight=0.1"}, {"moe.z_loss_weight is 0.1", "has 0.0"});
  expect_refused({"--training.gradient_accumulation_steps=2"}, {"has 1"});
  expect_refused({"--moe.replay=folder"}, {"moe.replay is folder", "has \"\""});
  expect_refused({"--training.global_batch_size=8"},
                 {"training.global_batch_size is 8", "has 4 sequences"});
}

TEST_F(GoldenSettings, ThatAreSoAreAccepted) {
  expect_accepted({});
  expect_accepted({"--model=deepseek_v3:tiny", "--model.top_k=2", "--data.sequence_length=5",
                   "--moe.z_loss_weight=0", "--data.batch_size=2", "--mesh=dp_shard=2,tp=2"});
  expect_accepted({"--model=deepseek_v3", "--dtype=float64"});
  expect_accepted({"--training.global_batch_size=0"});  // as print-config writes it
  expect_accepted({"--training.global_batch_size=4"});
}

// The file has tensors that the model has not: it is named, and not the folder that it lies in.
TEST_F(GoldenSettings, OfAnotherModelAreNamed) {
  NamedTensors tensors;
  for (const char* name : {"input_ids", "labels"})
    tensors.tensors.emplace_back(name, at::zeros({4, 5}, at::kLong));
  for (const char* name : {"loss", "logits", "grad.another"})
    tensors.tensors.emplace_back(name, at::zeros({1}));
  write_tensors(file(), tensors);
  expect_parts(error({"--lora.rank=2"}, ErrorKind::data),
               {"'" + file() + "' does not hold the tensors"});
}

// What is wrong with a mesh is said with the value of the checkpoint, and where that comes from.
TEST_F(GoldenSettings, OriginsAreThoseOfTheCheckpoint) {
  const auto text = error({"--mesh=tp=3"}, ErrorKind::config);
  expect_parts(text, {"parallelism.tensor_parallel_degree is 3 (command line, --mesh)",
                      "model.num_heads is 8 (", "config.json)"});
}

}  // namespace
}  // namespace moesh::verify
