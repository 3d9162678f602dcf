// tokenizer_peer TOKENIZER encode|plain|spans|decode|skip INPUT OUTPUT: what tokenizer_peer.py
// compares with the package. Texts and lists of ids are written one behind the other, each with its
// length as 32 bits before it. `plain` encodes without the template, `spans` gives id, first and
// last byte of each token, `skip` decodes without special tokens. Prints the seconds that the work
// itself took.

#include <chrono>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

#include "moesh/base/error.h"
#include "moesh/tokenizer/tokenizer.h"

namespace {

std::vector<std::string_view> records(const std::string& bytes, std::size_t item) {
  std::vector<std::string_view> all;
  for (std::size_t at = 0; at < bytes.size();) {
    std::uint32_t count;
    std::memcpy(&count, bytes.data() + at, 4);
    all.push_back(std::string_view(bytes).substr(at + 4, count * item));
    at += 4 + count * item;
  }
  return all;
}

}  // namespace

int main(int argc, char** argv) try {
  using namespace moesh::tokenizer;
  if (argc != 5) return 2;
  const Tokenizer tokenizer = Tokenizer::read(argv[1]);
  const std::string what = argv[2];
  std::ifstream input(argv[3], std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(input)), {});
  std::ofstream output(argv[4], std::ios::binary);
  const auto put = [&](const void* data, std::size_t count, std::size_t item) {
    const auto length = static_cast<std::uint32_t>(count);
    output.write(reinterpret_cast<const char*>(&length), 4);
    output.write(static_cast<const char*>(data), static_cast<std::streamsize>(count * item));
  };
  const auto start = std::chrono::steady_clock::now();
  if (what == "encode" || what == "plain") {
    EncodeBuffers buffers;
    std::vector<TokenId> all;
    std::vector<std::size_t> ends;
    for (const std::string_view text : records(bytes, 1)) {
      tokenizer.encode(text, what == "encode", buffers, all);
      ends.push_back(all.size());
    }
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
    std::cout << time.count() << "\n";
    for (std::size_t i = 0, begin = 0; i < ends.size(); begin = ends[i++])
      put(all.data() + begin, ends[i] - begin, sizeof(TokenId));
  } else if (what == "spans") {
    EncodeBuffers buffers;
    for (const std::string_view text : records(bytes, 1)) {
      std::vector<TokenId> ids;
      std::vector<ByteRange> spans;
      tokenizer.encode(text, false, buffers, ids, &spans);
      if (ids.size() != spans.size()) return 3;
      std::vector<std::uint32_t> numbers;
      for (std::size_t i = 0; i < ids.size(); ++i)
        for (const auto number : {static_cast<std::size_t>(ids[i]), spans[i].begin, spans[i].end})
          numbers.push_back(static_cast<std::uint32_t>(number));
      put(numbers.data(), numbers.size(), sizeof(std::uint32_t));
    }
  } else {
    for (const std::string_view record : records(bytes, sizeof(TokenId))) {
      std::vector<TokenId> ids(record.size() / sizeof(TokenId));
      std::memcpy(ids.data(), record.data(), record.size());
      const std::string text = tokenizer.decode(ids, what == "skip");
      put(text.data(), text.size(), 1);
    }
  }
  return 0;
} catch (const moesh::Error& e) {
  std::cerr << e.what() << "\n";
  return 1;
}
