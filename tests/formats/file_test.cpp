#include "moesh/formats/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <thread>

#include "tests/faulty_file_system.h"
#include "tests/support.h"

namespace moesh::formats {
namespace {

TEST(File, GivesEveryByte) {
  std::string bytes;
  for (int i = 0; i < 200'000; ++i) bytes += static_cast<char>(i % 256);
  EXPECT_EQ(read_file(TemporaryFile("bytes.bin", bytes).path(), ErrorKind::data), bytes);
  EXPECT_EQ(read_file(TemporaryFile("empty", "").path(), ErrorKind::data), "");
}

TEST(File, SaysWhyItCannotBeRead) {
  const std::string missing = testing::TempDir() + "no_such_file.toml";
  expect_parts(error_of([&] { read_file(missing, ErrorKind::config); }, ErrorKind::config),
               {missing, "No such file"});
  expect_parts(error_of([&] { read_file(testing::TempDir(), ErrorKind::data); }, ErrorKind::data),
               {"it is a folder"});
}

TEST(File, APipeOrADeviceIsRefusedWithoutWaiting) {
  const TemporaryFile file("x", "");
  const std::string pipe = file.path() + ".pipe";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  expect_parts(error_of([&] { read_file(pipe, ErrorKind::config); }, ErrorKind::config),
               {"it is a pipe", "name a regular file"});
  expect_parts(error_of([&] { read_file("/dev/zero", ErrorKind::data); }, ErrorKind::data),
               {"it is a device"});
  expect_parts(error_of([&] { read_file(TemporaryFile("y", "12345").path(), ErrorKind::data, 4); },
                        ErrorKind::data),
               {"has 5 bytes", "at most 4"});
}

TEST(File, AConfigurationMayComeThroughAPipe) {
  const TemporaryFile file("x", "");
  const std::string pipe = file.path() + ".pipe";
  std::filesystem::remove(pipe);
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  const auto written = [&](const std::string& text) {
    return std::thread([=] {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      std::ofstream(pipe) << text.substr(0, 3) << std::flush << text.substr(3);
    });
  };
  const std::string text(200'000, 'a');
  auto writer = written(text);
  EXPECT_EQ(read_file_or_pipe(pipe, ErrorKind::config, 1 << 20), text);
  writer.join();
  std::signal(SIGPIPE, SIG_IGN);  // of the writer, when nobody reads on
  writer = written(text);
  expect_parts(
      error_of([&] { read_file_or_pipe(pipe, ErrorKind::config, 1000); }, ErrorKind::config),
      {"more than 1000 bytes"});
  writer.join();
  std::signal(SIGPIPE, SIG_DFL);
  // Nobody writes; somebody writes and does not end.
  expect_parts(
      error_of([&] { read_file_or_pipe(pipe, ErrorKind::config, 1000, 0.2); }, ErrorKind::config),
      {"nothing was written to it within 0.2 s"});
  const int open_end = ::open(pipe.c_str(), O_RDWR);
  ASSERT_EQ(::write(open_end, "a = 1", 5), 5);
  expect_parts(
      error_of([&] { read_file_or_pipe(pipe, ErrorKind::config, 1000, 0.2); }, ErrorKind::config),
      {"its writer did not close it within 0.2 s"});
  ::close(open_end);
  expect_parts(
      error_of([&] { read_file_or_pipe("/dev/zero", ErrorKind::config, 1000); }, ErrorKind::config),
      {"it is a device"});
  std::filesystem::remove(pipe);
}

namespace fs = std::filesystem;

TEST(InputFile, ReadsARegularFileAndASymlinkToOne) {
  const TemporaryFile file("blob", "0123456789");
  const fs::path link = fs::path(file.path()).parent_path() / "model.safetensors";
  fs::create_symlink("blob", link);
  for (const fs::path& path : {fs::path(file.path()), link}) {
    const InputFile input(path);
    EXPECT_EQ(input.size(), 10u);
    std::string part(3, ' ');
    input.read(4, std::as_writable_bytes(std::span(part)));
    EXPECT_EQ(part, "456");
    EXPECT_EQ(input.read_all(10), "0123456789");
    expect_parts(error_of([&] { input.read_all(9); }, ErrorKind::data),
                 {path.string(), "has 10 bytes", "at most 9"});
    expect_parts(
        error_of([&] { input.read(8, std::as_writable_bytes(std::span(part))); }, ErrorKind::data),
        {path.string(), "3 bytes", "from byte 8", "it has 10"});
  }
}

TEST(InputFile, RefusesWhatIsNoRegularFileWithoutWaiting) {
  const TemporaryFile file("blob", "");
  const fs::path folder = fs::path(file.path()).parent_path();
  const auto error = [](const fs::path& path) {
    return error_of([&] { InputFile{path}; }, ErrorKind::data);
  };
  fs::create_directory_symlink(folder, folder / "to_folder");
  fs::create_symlink("nowhere", folder / "to_nothing");
  ASSERT_EQ(mkfifo((folder / "pipe").c_str(), 0600), 0);
  fs::create_symlink("pipe", folder / "to_pipe");
  expect_parts(error(folder), {folder.string(), "it is a folder"});
  expect_parts(error(folder / "to_folder"), {"to_folder", "it is a folder"});
  expect_parts(error(folder / "to_nothing"), {"to_nothing", "No such file"});
  expect_parts(error(folder / "pipe"),
               {"pipe", "it is a pipe"});  // it has no writer: waiting would be for ever
  expect_parts(error(folder / "to_pipe"), {"to_pipe", "it is a pipe"});
  expect_parts(error("/dev/zero"), {"/dev/zero", "it is a device"});
  expect_parts(error(""), {"cannot read"});
}

// Only a lock that somebody holds keeps others out: a file system may have none at all.
TEST(OutputFile, IsLockedByOneWhereThereAreLocks) {
  const TemporaryFile file("out.bin", "");
  const auto locked_where = [&](int code) {
    FaultyFileSystem faulty({{.call = "lock", .part = "out.bin", .code = code}});
    set_file_system(&faulty);
    OutputFile out(file.path(), OutputFile::Mode::open, "cure");
    const bool result = out.lock();
    set_file_system(nullptr);
    EXPECT_EQ(faulty.num_hit(), code == 0 ? 0 : 1);
    return result;
  };
  EXPECT_FALSE(locked_where(EAGAIN));
  EXPECT_FALSE(locked_where(EACCES));
  EXPECT_TRUE(locked_where(ENOLCK));
  EXPECT_TRUE(locked_where(ENOTSUP));
}

TEST(InputFile, ClosesWhatItOpened) {
  const TemporaryFile file("blob", "x");
  const auto num_open = [] {
    const fs::directory_iterator all("/proc/self/fd");
    return std::distance(begin(all), end(all));
  };
  const auto before = num_open();
  for (int i = 0; i < 10; ++i) {
    InputFile input(file.path());
    const InputFile moved(std::move(input));
    error_of([&] { InputFile{fs::path(file.path()).parent_path()}; }, ErrorKind::data);
  }
  EXPECT_EQ(num_open(), before);
}

}  // namespace
}  // namespace moesh::formats
