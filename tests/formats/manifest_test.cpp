#include "moesh/formats/manifest.h"

#include "moesh/base/random.h"
#include "tests/support.h"

namespace moesh::formats {
namespace {

namespace fs = std::filesystem;

Manifest example() {
  return {
      .step = 12,
      .model = "deepseek_v3",
      .size = "tiny",
      .mesh = "dp_shard=2,tp=2",
      .seed = -7,
      .data_position = 96,
      .extra = {{"a", "\"quoted\"\n"}, {"b", ""}},
      .files = {
          {.name = "model.safetensors", .size = kBlockBytes + 1, .blocks = {0, ~std::uint64_t{0}}},
          {.name = "optimizer/x.safetensors", .size = 5, .blocks = {0x0123456789abcdef}},
          {.name = "empty", .size = 0}}};
}

Manifest parsed(const std::string& text) { return parse_manifest(text, "moesh.json"); }

// A text with the first line that makes it whole, as a forger of a manifest would write it.
std::string sealed(const std::string& rest) {
  return "{\"checksum\": \"" + checksum_text(hash_block(rest)) + "\",\n" + rest;
}

// The example with a part of its text replaced by another, and sealed again.
std::string forged(const std::string& part, const std::string& other) {
  std::string rest = write_manifest(example());
  rest.erase(0, rest.find('\n') + 1);
  const auto at = rest.find(part);
  EXPECT_NE(at, std::string::npos) << part;
  return sealed(rest.replace(at, part.size(), other));
}

std::string manifest_error(const std::string& text) {
  return error_of([&] { parsed(text); }, ErrorKind::data);
}

TEST(Checksum, IsThatOfXxh3) {
  // From the test vectors of xxHash: XXH3 of nothing, with seed 0.
  EXPECT_EQ(hash_block(""), 0x2d06800538d394c2u);
  EXPECT_EQ(checksum_text(0x2d06800538d394c2u), "2d06800538d394c2");
  EXPECT_EQ(checksum_text(0), "0000000000000000");
  for (const std::uint64_t value :
       {std::uint64_t{0}, std::uint64_t{1}, ~std::uint64_t{0}, std::uint64_t{0xabcdef}})
    EXPECT_EQ(parse_checksum(checksum_text(value)), value);
  for (const char* text :
       {"", "0", "2D06800538d394c2", "2d06800538d394c2 ", "0x06800538d394c2", "-d06800538d394c2"})
    expect_parts(error_of([&] { parse_checksum(text); }, ErrorKind::data), {"is not a checksum"});
}

TEST(Checksum, BlocksCoverAFile) {
  EXPECT_EQ(num_blocks(0), 0u);
  EXPECT_EQ(num_blocks(1), 1u);
  EXPECT_EQ(num_blocks(kBlockBytes), 1u);
  EXPECT_EQ(num_blocks(kBlockBytes + 1), 2u);
  EXPECT_EQ(num_blocks(~std::uint64_t{0}), std::uint64_t{1} << 42);  // and no overflow on the way
}

TEST(Manifest, WhatIsWrittenReadsBackTheSame) {
  EXPECT_EQ(parsed(write_manifest(example())), example());
  EXPECT_EQ(parsed(write_manifest({})), Manifest());
  ASSERT_NE(example().find("empty"), nullptr);
  EXPECT_EQ(example().find("model"), nullptr);
  EXPECT_EQ(parsed(forged("12", "13")).step, 13)
      << "forging must work, or the tests below see only the checksum";
}

TEST(Manifest, EveryFlippedBitAndEveryTruncationIsFound) {
  const std::string whole = write_manifest(example());
  for (std::size_t bit = 0; bit < 8 * whole.size(); ++bit) {
    std::string flipped = whole;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ 1 << bit % 8);
    EXPECT_THROW(parsed(flipped), Error) << "bit " << bit;
  }
  for (std::size_t size = 0; size < whole.size(); ++size)
    EXPECT_THROW(parsed(whole.substr(0, size)), Error) << size;
  expect_parts(manifest_error(whole + ' '),
               {"moesh.json: ", "checksum of its first line", "damaged"});
}

TEST(Manifest, RefusesWhatIsWrongInItself) {
  expect_parts(manifest_error(forged("\"format\": 1", "\"format\": 2")),
               {"moesh.json: ", "format 2", "reads format 1"});
  expect_parts(manifest_error(forged("\"step\": 12", "\"step\": -12")), {"step -12"});
  expect_parts(manifest_error(forged("\"data_position\": 96", "\"data_position\": -1")),
               {"data_position -1"});
  expect_parts(manifest_error(forged("\"step\": 12", "\"step\": 1.5")), {"\"step\" is a number"});
  expect_parts(manifest_error(forged("\"step\": 12,", "")), {"has no \"step\""});
  expect_parts(manifest_error(forged("\"step\": 12", "\"step\": 12, \"step\": 12")),
               {"\"step\" comes twice"});
  expect_parts(manifest_error(forged("\"seed\"", "\"checksum\": \"\", \"seed\"")),
               {"\"checksum\" comes twice"});
  expect_parts(manifest_error(forged("model.safetensors", "moesh.json")), {"lists itself"});
  expect_parts(manifest_error(forged("model.safetensors", "empty")), {"\"empty\" twice"});
  expect_parts(manifest_error(forged("optimizer/x", "../x")),
               {"does not name a file of this folder"});
  expect_parts(manifest_error(forged("optimizer/x", "/x")),
               {"does not name a file of this folder"});
  expect_parts(manifest_error(forged("optimizer/x", "a/b/x")),
               {"does not name a file of this folder"});
  expect_parts(manifest_error(forged("\"size\": 5", "\"size\": 4194305")),
               {"4194305 bytes has 1 checksums", "2"});
  expect_parts(manifest_error(forged("\"size\": 5", "\"size\": -5")), {"\"size\" is -5"});
  expect_parts(manifest_error(forged("\"size\": 5", "\"size\": 18446744073709551615")),
               {"has 1 checksums"});
  expect_parts(manifest_error(forged("0123456789abcdef", "0123456789ABCDEF")),
               {"is not a checksum"});
  expect_parts(manifest_error(forged("\"b\": \"\"", "\"b\": 3")),
               {"\"b\" is a whole number", "a text"});
  expect_parts(manifest_error(forged("\"tiny\"", "\"\xff\"")), {"not JSON", "UTF-8"});
  expect_parts(manifest_error(sealed("")), {"not JSON"});
  expect_parts(error_of([] { write_manifest({.files = {{.name = "../x"}}}); }, ErrorKind::data),
               {"does not name a file"});
  expect_parts(
      error_of([] { write_manifest({.files = {{.name = "x", .size = 1}}}); }, ErrorKind::data),
      {"has 0 checksums"});
}

// Pieces of any length in any order have the sums of the whole; one changed bit has others.
TEST(BlockSums, AreThoseOfTheWholeWhoeverAddsThePieces) {
  const Random random(2, "sums");
  std::string bytes(kBlockBytes + 1003, '\0');
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(random.bits(i));
  BlockSums whole;
  whole.add(0, bytes);
  ASSERT_EQ(whole.blocks().size(), 2u);
  BlockSums even, odd;
  std::uint64_t draw = bytes.size();
  for (std::size_t at = 0, i = 0; at < bytes.size(); ++i) {
    const auto count = std::min<std::size_t>(bytes.size() - at, 1 + random.below(draw++, 5000));
    (i % 2 ? odd : even).add(at, std::string_view(bytes).substr(at, count));
    at += count;
  }
  for (std::size_t b = 0; b < 2; ++b) {
    BlockSums::BlockSum both;
    for (const BlockSums* half : {&even, &odd})
      if (b < half->blocks().size()) {
        both.sum += half->blocks()[b].sum;
        both.num_bytes += half->blocks()[b].num_bytes;
      }
    EXPECT_EQ(both, whole.blocks()[b]);
    EXPECT_EQ(both.num_bytes, b == 0 ? kBlockBytes : 1003);
  }
  for (std::uint64_t i = 0; i < 200; ++i) {
    const auto at = random.below(draw++, bytes.size());
    bytes[at] = static_cast<char>(bytes[at] ^ (1 << i % 8));
    BlockSums changed;
    changed.add(0, bytes);
    EXPECT_NE(changed.blocks(), whole.blocks()) << at;
    bytes[at] = static_cast<char>(bytes[at] ^ (1 << i % 8));
  }
}

// As a bad data line does it: the same bit of several words, each bit of a word in turn.
TEST(BlockSums, FindTheSameBitOfSeveralWords) {
  const Random random(3, "line");
  std::string bytes(4096, '\0');
  BlockSums whole;
  whole.add(0, bytes);
  std::uint64_t draw = 0;
  for (std::size_t bit = 0; bit < 64; ++bit)
    for (const int count : {2, 8}) {
      std::string changed = bytes;
      for (int i = 0; i < count; ++i)
        changed[8 * (64 * i + random.below(draw++, 64)) + bit / 8] =
            static_cast<char>(1 << bit % 8);
      BlockSums sums;
      sums.add(0, changed);
      EXPECT_NE(sums.blocks(), whole.blocks()) << "bit " << bit << " of " << count << " words";
    }
}

// As a disk does it that mixes up sectors, or writes one twice: what moved has another sum.
TEST(BlockSums, FindWhatIsInAnotherPlace) {
  const Random random(4, "place");
  std::string bytes(64 << 10, '\0');
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(random.bits(i));
  BlockSums whole;
  whole.add(0, bytes);
  for (const std::size_t size : {4, 8, 512, 4096, 16384})
    for (const bool twice : {false, true})
      for (std::size_t at = size; at + size <= bytes.size();
           at += std::max<std::size_t>(size, 2048)) {
        std::string moved = bytes;
        moved.replace(0, size, bytes, at, size);
        if (!twice) moved.replace(at, size, bytes, 0, size);
        BlockSums sums;
        sums.add(0, moved);
        EXPECT_NE(sums.blocks(), whole.blocks()) << size << " bytes from " << at;
      }
}

TEST(Manifest, FindsEveryChangeOfAFile) {
  std::string bytes;
  const Random random(1, "manifest");
  for (std::uint64_t i = 0; i < kBlockBytes + 10; ++i) bytes += static_cast<char>(i % 251);
  const TemporaryFile file("x.bin", bytes);
  const std::string folder = fs::path(file.path()).parent_path().string();
  BlockSums written;
  written.add(0, bytes);
  const ManifestFile hashed = hash_file(folder, "x.bin", written);
  EXPECT_EQ(hashed.size, bytes.size());
  ASSERT_EQ(hashed.blocks.size(), 2u);
  EXPECT_EQ(hashed.blocks[1], hash_block(std::string_view(bytes).substr(kBlockBytes)));
  EXPECT_NO_THROW(check_file(folder, hashed));
  BlockSums other;
  other.add(0, bytes.substr(0, kBlockBytes) + "0123456789");
  expect_parts(error_of([&] { hash_file(folder, "x.bin", other); }, ErrorKind::storage),
               {"x.bin", "other bytes than were written"});

  for (std::uint64_t i = 0; i < 20; ++i) {
    const std::size_t at = i == 0 ? bytes.size() - 1 : random.below(i, bytes.size());
    std::fstream out(file.path(), std::ios::in | std::ios::out | std::ios::binary);
    out.seekp(static_cast<std::streamoff>(at))
        .put(static_cast<char>(bytes[at] ^ 1 << i % 8))
        .flush();
    const std::string bytes_of_block =
        at < kBlockBytes ? "bytes 0 to 4194304" : "bytes 4194304 to 4194314";
    expect_parts(error_of([&] { check_file(folder, hashed); }, ErrorKind::data),
                 {"\"x.bin\" is damaged", bytes_of_block});
    out.seekp(static_cast<std::streamoff>(at)).put(bytes[at]).flush();
    EXPECT_NO_THROW(check_file(folder, hashed));
  }
  fs::resize_file(file.path(), bytes.size() + 1);
  expect_parts(error_of([&] { check_file(folder, hashed); }, ErrorKind::data),
               {"\"x.bin\" is damaged", "has 4194315 bytes", "4194314"});
  fs::resize_file(file.path(), bytes.size() - 1);
  expect_parts(error_of([&] { check_file(folder, hashed); }, ErrorKind::data),
               {"\"x.bin\" is damaged", "has 4194313 bytes", "4194314"});
  fs::remove(file.path());
  expect_parts(error_of([&] { check_file(folder, hashed); }, ErrorKind::data),
               {"x.bin", "No such file"});
}

TEST(Manifest, ABlockIsCheckedWhole) {
  const ManifestFile file{.name = "x", .size = 3, .blocks = {hash_block("abc")}};
  const auto check = [&](std::uint64_t index, std::string_view bytes) {
    check_block(file, index, std::as_bytes(std::span(bytes)));
  };
  EXPECT_NO_THROW(check(0, "abc"));
  expect_parts(error_of([&] { check(0, "abd"); }, ErrorKind::data),
               {"\"x\" is damaged", "bytes 0 to 3"});
  expect_parts(error_of([&] { check(0, "ab"); }, ErrorKind::internal),
               {"has 3 bytes; 2 were given"});
  expect_parts(error_of([&] { check(1, ""); }, ErrorKind::internal), {"has 1 blocks"});
}

TEST(Manifest, IsReadFromAFolder) {
  const TemporaryFile file(kManifestFile, write_manifest(example()));
  EXPECT_EQ(read_manifest(fs::path(file.path()).parent_path().string()), example());
  const TemporaryFile broken(kManifestFile, "{}");
  expect_parts(error_of([&] { read_manifest(fs::path(broken.path()).parent_path().string()); },
                        ErrorKind::data),
               {broken.path() + ": ", "damaged"});
  expect_parts(error_of([&] { hash_file(testing::TempDir(), "../x", {}); }, ErrorKind::data),
               {"does not name a file"});
}

}  // namespace
}  // namespace moesh::formats
