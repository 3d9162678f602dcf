// What a checkpoint remembers of its run, so that a run with other data or settings is noticed.

#include "moesh/train/checkpointer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <set>

#include "moesh/config/merge.h"
#include "moesh/formats/checksum.h"
#include "tests/checkpoint/support.h"
#include "tests/support.h"

namespace moesh::train {
namespace {

void write(const std::filesystem::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

Config with_data(const std::string& path, const std::string& kind = "auto") {
  Config config;
  config.data.path = path, config.data.kind = kind;
  return config;
}

TEST(Fingerprint, SeesTheSizeAndBothEndsOfAFile) {
  const TemporaryFolder folder;
  const auto file = folder.path() / "a.txt";
  const auto of = [&](const std::string& text) {
    write(file, text);
    return fingerprint_of_data(with_data(file));
  };
  std::string text(3 * formats::kBlockBytes, 'x');
  const std::string right = of(text);
  EXPECT_EQ(of(text), right);
  std::set<std::string> all{right, of(text + 'x'), of(text.substr(1))};
  for (const std::size_t at : {std::size_t{0}, text.size() - 1}) {
    std::string other = text;
    other[at] = 'y';
    all.insert(of(other));
  }
  EXPECT_EQ(all.size(), 5u);
  EXPECT_NE(of("a"), of("b"));
  EXPECT_EQ(fingerprint_of_data(with_data(folder.path() / "none.txt")), "none");
  EXPECT_EQ(fingerprint_of_data(with_data("")), "none");
}

TEST(Fingerprint, OfTokensIsThatOfAllTheirFiles) {
  const TemporaryFolder folder;
  const std::string prefix = folder.path() / "ids";
  const auto write_all = [&](const std::string& bin, const std::string& idx) {
    write(prefix + ".bin", bin), write(prefix + ".idx", idx);
    return fingerprint_of_data(with_data(prefix + ".bin", "indexed"));
  };
  const std::string right = write_all("0123", "4567");
  EXPECT_EQ(fingerprint_of_data(with_data(prefix + ".idx", "indexed")), right);
  EXPECT_EQ(fingerprint_of_data(with_data(prefix, "indexed")), right);
  EXPECT_EQ(fingerprint_of_data(with_data(prefix + ".idx")), right) << "by its name";
  EXPECT_NE(fingerprint_of_data(with_data(prefix + ".bin", "uint16")), right) << "one file";
  EXPECT_NE(write_all("0124", "4567"), right);
  EXPECT_NE(write_all("0123", "4568"), right);
  EXPECT_EQ(write_all("0123", "4567"), right);
  write(prefix + ".mask", "a");
  const std::string masked = fingerprint_of_data(with_data(prefix, "indexed"));
  EXPECT_TRUE(masked.starts_with(right + "+")) << masked;
  write(prefix + ".mask", "b");
  EXPECT_NE(fingerprint_of_data(with_data(prefix, "indexed")), masked);
}

TEST(Fingerprint, OfSourcesIsThatOfEachInOrder) {
  const TemporaryFolder folder;
  const std::string a = folder.path() / "a.txt", b = folder.path() / "b.txt";
  write(a, "one"), write(b, "two");
  Config config;
  config.data.source = {{.path = a}, {.path = b}};
  EXPECT_EQ(fingerprint_of_data(config),
            fingerprint_of_data(with_data(a)) + " " + fingerprint_of_data(with_data(b)));
}

std::string remembered_text(const std::vector<std::string>& args) {
  std::string text;
  for (const auto& s : remembered(config::load_config(args), "F"))
    text += s.key + "=" + s.value + (s.gives_position_its_meaning ? "! " : " ");
  return text;
}

TEST(Remembered, IsWhatChangesTheNumbersOfARun) {
  const TemporaryFolder folder;
  const std::string a = folder.path() / "a.txt", b = folder.path() / "b.jsonl";
  write(a, "one"), write(b, "{\"text\": \"two\"}\n");
  const std::string last =
      "data.batch_size=5 training.seed=0 training.global_batch_size=0 "
      "training.gradient_accumulation_steps=1 moe.balance_loss_weight=1e-4 "
      "moe.balance_over=sequence moe.z_loss_weight=0.0 training.mtp_loss_weight=0.3 "
      "training.freeze= ";
  EXPECT_EQ(remembered_text({"--data.seed=3", "--data.batch_size=5"}),
            "data.fingerprint=F! data.kind=auto! data.sequence_length=64! data.seed=3! "
            "data.shuffle=true! data.packing=cut! data.tokenizer=none! data.document_mask=false "
            "data.synthetic_successors=4! data.path= " +
                last);
  const std::string of_file = remembered_text(
      {"--data.path=" + b, "--data.batch_size=5", "--model.vocab_size=257", "--lora.rank=2"});
  EXPECT_EQ(of_file,
            "data.fingerprint=F! data.kind=auto! data.sequence_length=64! data.seed=0! "
            "data.shuffle=true! data.packing=cut! data.tokenizer=none! data.document_mask=true "
            "data.path=" +
                b + " " + last +
                "lora.rank=2 lora.targets=all-linear lora.rank_pattern= lora.alpha=8.0 "
                "lora.use_rslora=false lora.alpha_pattern= lora.dropout=0.0 lora.base=compute ");
  const std::string of_sources = remembered_text(
      {"--data.source.0.path=" + a, "--data.source.1.path=" + b, "--data.source.1.weight=2.5",
       "--data.batch_size=5", "--model.vocab_size=257"});
  EXPECT_NE(of_sources.find("data.source.0.weight=1.0! data.source.0.kind=text! "
                            "data.source.1.weight=2.5! data.source.1.kind=jsonl! data.path= "),
            std::string::npos)
      << of_sources;
  EXPECT_EQ(of_sources.find("synthetic"), std::string::npos) << of_sources;
}

// What a run of one step says beside its numbers.
std::string said_of_run(const std::vector<std::string>& args) {
  const TemporaryFolder folder;
  testing::internal::CaptureStderr();
  auto all = args;
  all.push_back("--steps=1");
  run(folder.path() / "c", "tp=1", all);
  return testing::internal::GetCapturedStderr();
}

TEST(KeysWithoutEffect, AreNamed) {
  const std::string adamw = said_of_run(
      {"--training.mtp_loss_weight=0.5", "--optimizer.muon_momentum=0.5",
       "--optimizer.nesterov=false", "--optimizer.momentum=0.5", "--optimizer.beta1=0.8"});
  expect_parts(adamw, {"training.mtp_loss_weight is 0.5 (command line), which has no effect: the "
                       "model has no layers for multi-token prediction",
                       "optimizer.muon_momentum is 0.5 (command line), which has no effect: "
                       "optimizer.name is \"adamw\"",
                       "optimizer.nesterov is false", "optimizer.momentum is 0.5"});
  EXPECT_EQ(adamw.find("beta1"), std::string::npos) << adamw;
  const std::vector<std::string> muon{"--optimizer.name=muon", "--optimizer.muon_by_head=true"};
  auto grouped = muon;
  grouped.push_back("--model=qwen3_moe:tiny");
  expect_parts(said_of_run(grouped),
               {"optimizer.muon_by_head is true (command line), which has no effect: qwen3_moe has "
                "no multi-head latent attention"});
  auto latent = muon;
  for (const char* option :
       {"--model=deepseek_v3:tiny", "--model.num_mtp_layers=1", "--training.mtp_loss_weight=0.5",
        "--optimizer.beta1=0.8", "--optimizer.nesterov=false"})
    latent.push_back(option);
  const std::string all_read = said_of_run(latent);
  EXPECT_EQ(all_read.find("no effect"), std::string::npos) << all_read;
}

}  // namespace
}  // namespace moesh::train
