#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmath>
#include <future>
#include <list>
#include <thread>

#include "moesh/report/page.h"
#include "tests/support.h"

namespace moesh::report {
namespace {

class Folder {
 public:
  explicit Folder(const std::string& text) : file_("metrics.jsonl", text) {}
  std::filesystem::path path() const { return std::filesystem::path(file_.path()).parent_path(); }
  void append(const std::string& text) const {
    std::ofstream(file_.path(), std::ios::app | std::ios::binary) << text;
  }

 private:
  TemporaryFile file_;
};

TEST(RunData, HasAColumnForEveryNumber) {
  const Folder folder(
      "{\"step\":1,\"loss\":2.5,\"skipped\":false,\"sections\":{\"data\":0.5},"
      "\"expert_entropy\":[1,2],"
      "\"expert_bias\":[[-1,2],[0,1]],\"validation\":{\"a b\":{\"loss\":3,\"perplexity\":20}}}\n"
      "not a record\n"
      "{\"step\":2,\"loss\":null,\"lr\":0.25}\n");
  const RunData run(folder.path());
  EXPECT_EQ(run.size(), 2u);
  const auto& columns = run.columns();
  for (const auto& [name, column] : columns) EXPECT_EQ(column.size(), 2u) << name;
  EXPECT_EQ(columns.at("loss")[0], 2.5);
  EXPECT_TRUE(std::isnan(columns.at("loss")[1]));
  EXPECT_TRUE(std::isnan(columns.at("lr")[0]));
  EXPECT_EQ(columns.at("lr")[1], 0.25);
  EXPECT_EQ(columns.at("sections.data")[0], 0.5);
  EXPECT_EQ(columns.at("expert_entropy.1")[0], 2);
  EXPECT_EQ(columns.at("bias_range")[0], 3);
  EXPECT_EQ(columns.at("validation.a b")[0], 3);
  EXPECT_EQ(columns.at("skipped")[0], 0);
}

// Another program may have written the file, or a disk damaged it.
TEST(RunData, LeavesOutWhatIsNotAsMoeshWritesIt) {
  const Folder folder(
      "{\"step\":1,\"expert_bias\":3,\"loss\":2}\n"
      "{\"step\":2,\"validation\":[1],\"loss\":3,\"expert_counts\":[[-1,2]]}\n"
      "{\"step\":3,\"expert_counts\":7,\"expert_bias\":[[1,\"a\"]],\"loss\":4}\n"
      "[1]\n\"step\"\n");
  const RunData run(folder.path());
  EXPECT_EQ(run.size(), 3u);
  EXPECT_EQ(run.columns().at("loss"), (std::vector<double>{2, 3, 4}));
  for (const auto& [name, column] : run.columns()) EXPECT_EQ(column.size(), 3u) << name;
}

TEST(RunData, HasANameOfItsOwnBesideOthers) {
  const Folder folder("");
  std::vector<RunData> runs;
  for (const char* name : {"a/outputs", "b/outputs", "a/run/x", "b/run/x", "c/y", "c/y"}) {
    const auto path = folder.path() / name;
    std::filesystem::create_directories(path);
    std::ofstream(path / "metrics.jsonl") << "{\"step\":1}\n";
    runs.emplace_back(path);
  }
  EXPECT_EQ(runs[0].name(), "outputs");
  tell_apart(runs);
  std::vector<std::string> names;
  for (const RunData& run : runs) names.push_back(run.name());
  const std::vector<std::string> wanted{"a/outputs", "b/outputs", "a/run/x",
                                        "b/run/x",   "c/y",       "c/y (6)"};
  EXPECT_EQ(names, wanted);
}

TEST(RunData, ReadsOnAndNoticesAFileThatWasReplaced) {
  const Folder folder("{\"step\":1}\n{\"st");
  RunData run(folder.path());
  const auto generation = run.generation();
  EXPECT_EQ(run.size(), 1u);
  folder.append("ep\":2}\n{\"step\":3}\n");
  run.update();
  EXPECT_EQ(run.size(), 3u);
  EXPECT_EQ(run.generation(), generation);
  const auto beside = folder.path() / "new";
  std::ofstream(beside) << "{\"step\":1}\n{\"step\":2}\n";
  std::filesystem::rename(beside, folder.path() / "metrics.jsonl");
  run.update();
  EXPECT_EQ(run.size(), 2u);
  EXPECT_NE(run.generation(), generation);
}

TEST(RunData, FramesAreEvenlyChosen) {
  std::string text;
  for (int step = 1; step <= 3000; ++step)
    text += "{\"step\":" + std::to_string(step) + ",\"expert_counts\":[[1,2],[3," +
            std::to_string(step) + "]]}\n";
  const Folder folder(text);
  const RunData run(folder.path());
  EXPECT_EQ(run.num_layers(), 2u);
  EXPECT_EQ(run.num_experts(), 2u);
  ASSERT_GE(run.frames().size(), 150u);
  ASSERT_LE(run.frames().size(), 400u);
  const auto& frames = run.frames();
  for (std::size_t i = 0; i < frames.size(); ++i) {
    EXPECT_EQ(frames[i].counts[3], frames[i].step);
    if (i > 1) {
      EXPECT_EQ(frames[i].step - frames[i - 1].step, frames[1].step - frames[0].step);
    }
  }
}

TEST(RunData, SaysWhatIsNoRun) {
  const Folder folder("");
  expect_parts(error_of([&] { RunData(folder.path() / "none"); }, ErrorKind::config),
               {"none' is not a folder"});
  std::filesystem::remove(folder.path() / "metrics.jsonl");
  expect_parts(error_of([&] { RunData(folder.path()); }, ErrorKind::config),
               {"has no metrics.jsonl"});
}

TEST(RunData, WaitsForNoPipe) {
  const Folder folder("{\"step\":1}\n");
  ASSERT_EQ(mkfifo((folder.path() / "starts.jsonl").c_str(), 0600), 0);
  expect_parts(error_of([&] { RunData(folder.path()); }, ErrorKind::data),
               {"starts.jsonl", "it is a pipe"});
  std::filesystem::remove(folder.path() / "metrics.jsonl");
  ASSERT_EQ(mkfifo((folder.path() / "metrics.jsonl").c_str(), 0600), 0);
  std::filesystem::remove(folder.path() / "starts.jsonl");
  expect_parts(error_of([&] { RunData(folder.path()); }, ErrorKind::data),
               {"metrics.jsonl", "it is a pipe"});
}

TEST(Page, SendsWhatIsNotKnownYet) {
  const Folder folder(
      "{\"step\":1,\"expert_counts\":[[7]]}\n{\"step\":2,\"expert_counts\":[[8]]}\n");
  std::vector<RunData> runs;
  runs.emplace_back(folder.path());
  const auto generation = runs[0].generation();
  const auto sent = [&](const PageState& known) {
    const auto all = formats::parse_json(runs_json(runs, {known}), "answer");
    return all.at("runs", "").as_list("")[0];
  };
  EXPECT_EQ(sent({}).at("count", "").as_int(""), 2);
  EXPECT_EQ(sent({generation, 1, 1}).at("count", "").as_int(""), 1);
  // A 2.0 in little-endian, and the one frame that is new.
  EXPECT_EQ(sent({generation, 1, 1}).at("columns", "").at("step", "").at("d", "").as_text(""),
            "AAAAAAAAAEA=");
  EXPECT_EQ(sent({generation, 1, 1}).at("frames", "").at("counts", "").as_text(""), "CAAAAA==");
  EXPECT_EQ(sent({generation + 1, 1, 1}).at("count", "").as_int(""), 2) << "another file";
  EXPECT_EQ(sent({generation, 5, 1}).at("count", "").as_int(""), 2) << "it cannot have as many";
}

TEST(Page, NoTextOfARunEndsAScript) {
  const Folder folder("{\"step\":1,\"validation\":{\"</script><b>\":{\"loss\":1}}}\n");
  std::vector<RunData> runs;
  runs.emplace_back(folder.path());
  if (!*kDygraphsJs) {
    expect_parts(error_of([&] { page(runs, {}); }, ErrorKind::config), {"libjs-dygraphs"});
    return;
  }
  const std::string html = page(runs, {});
  EXPECT_EQ(html.find("</script><b>"), std::string::npos);
  EXPECT_NE(html.find("Permission is hereby granted, free of charge"), std::string::npos);
  EXPECT_EQ(html.find("sourceMappingURL"), std::string::npos);
}

TEST(Serve, AnswersThisMachineAlone) {
  const Folder folder("{\"step\":1}\n");
  std::vector<RunData> runs;
  runs.emplace_back(folder.path());
  const auto status = [&](const std::string& line, const std::string& headers) {
    return answer(line + " HTTP/1.1\r\n" + headers + "\r\n\r\n", runs, {}).substr(9, 3);
  };
  EXPECT_EQ(status("GET /data?known=1.0.0", "Host: 127.0.0.1:8080"), "200");
  EXPECT_EQ(status("GET /data?known=", "hOST: localhost"), "200");
  EXPECT_EQ(status("GET /data?known=x.-1,99999999999999999999", "Host: localhost"), "200");
  EXPECT_EQ(status("GET /data?known=1.0.0", "Host: elsewhere.example"), "403");
  EXPECT_EQ(status("GET /data?known=1.0.0", "Accept: *"), "403");
  EXPECT_EQ(status("POST /", "Host: 127.0.0.1"), "405");
  EXPECT_EQ(status("GET /metrics.jsonl", "Host: 127.0.0.1"), "404");
}

// A connection to the server, which sends what it is told to.
class Browser {
 public:
  explicit Browser(int port) {
    sockaddr_in address{};
    address.sin_family = AF_INET, address.sin_port = htons(static_cast<std::uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(::connect(file_, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  }
  ~Browser() { ::close(file_); }
  Browser(const Browser&) = delete;
  Browser& operator=(const Browser&) = delete;

  void say(const std::string& text) const { ::send(file_, text.data(), text.size(), MSG_NOSIGNAL); }
  std::string all() const {
    std::string text;
    char bytes[65536];
    for (ssize_t count; (count = ::recv(file_, bytes, sizeof bytes, 0)) > 0;)
      text.append(bytes, static_cast<std::size_t>(count));
    return text;
  }

 private:
  int file_ = ::socket(AF_INET, SOCK_STREAM, 0);
};

// Neither those that do not read, nor those that say nothing or say it slowly, keep the others
// waiting, or the server from ending: where they do, this test does not end.
TEST(Serve, NobodyWaitsForASlowReader) {
  std::string text;
  for (int step = 1; step <= 2000; ++step) {
    text += "{\"step\":" + std::to_string(step);
    for (int column = 0; column < 100; ++column) text += ",\"c" + std::to_string(column) + "\":1.5";
    text += "}\n";
  }
  const Folder folder(text);
  std::vector<RunData> runs;
  runs.emplace_back(folder.path());
  std::atomic<bool> stop = false;
  std::promise<int> port;
  std::thread server(
      [&] { serve(runs, {}, 0, stop, [&](int actual) { port.set_value(actual); }); });
  const int actual = port.get_future().get();
  const std::string request = "GET /data?known= HTTP/1.1\r\nHost: localhost\r\n\r\n";
  std::list<Browser> slow;
  for (int i = 0; i < 5; ++i) slow.emplace_back(actual).say(request);
  for (int i = 0; i < 100; ++i) slow.emplace_back(actual).say(i % 2 ? "" : "G");
  const Browser browser(actual);
  browser.say(request);
  const std::string answer = browser.all();
  EXPECT_EQ(answer.substr(9, 3), "200");
  EXPECT_GT(answer.size(), 1'000'000u);
  EXPECT_TRUE(answer.ends_with("}\n")) << "cut off";
  slow.emplace_back(actual).say(request);
  stop = true;
  server.join();
}

TEST(Verify, IsReadOrRefusedByName) {
  const TemporaryFile good(
      "verify.json",
      "{\"holds\":true,\"seconds\":1,\"meshes\":[{\"mesh\":\"tp=2\",\"holds\":true}]}");
  EXPECT_EQ(read_verify(good.path()).result.at("meshes", "").as_list("").size(), 1u);
  const TemporaryFile bad("other.json", "{\"estimates\":[]}");
  expect_parts(error_of([&] { read_verify(bad.path()); }, ErrorKind::config),
               {"other.json", "not a result of moesh verify --json"});
}

}  // namespace
}  // namespace moesh::report
