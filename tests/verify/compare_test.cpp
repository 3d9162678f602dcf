// `moesh compare` on files written by hand: every kind of difference, the factor, the worst
// element, renames.

#include "moesh/verify/compare.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>

#include "moesh/base/error.h"
#include "moesh/base/random.h"
#include "moesh/base/text.h"
#include "moesh/cli/commands.h"
#include "moesh/formats/safetensors.h"
#include "tests/support.h"

namespace moesh::verify {

namespace {

using Verdict = ComparedTensor::Verdict;
struct Named {
  std::string name;
  std::vector<std::int64_t> shape;
  std::vector<float> values;
};

// `moesh compare` with these arguments.
int run_it(std::vector<std::string> args) {
  args.insert(args.begin(), "compare");
  return cli::run_command(args);
}

class Compare : public testing::Test {
 protected:
  Compare() {
    const auto* test = testing::UnitTest::GetInstance()->current_test_info();
    folder_ =
        std::filesystem::temp_directory_path() / (std::string("moesh_compare_") + test->name());
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
  }
  ~Compare() override { std::filesystem::remove_all(folder_); }

  std::string write(const std::string& file, const std::vector<Named>& tensors) const {
    std::vector<formats::TensorInfo> infos;
    for (const auto& t : tensors)
      infos.push_back({.name = t.name, .dtype = formats::Dtype::f32, .shape = t.shape});
    const auto path = folder_ / file;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream out(path, std::ios::binary);
    out << formats::write_safetensors_header(infos, {});
    for (const auto& t : tensors)
      out.write(reinterpret_cast<const char*>(t.values.data()),
                static_cast<std::streamsize>(t.values.size() * sizeof(float)));
    return path.string();
  }
  static std::vector<float> random(size_t n, const char* name, float scale = 1) {
    std::vector<float> x(n);
    for (size_t i = 0; i < n; ++i) x[i] = scale * static_cast<float>(Random(1, name).normal(i));
    return x;
  }
  std::filesystem::path folder_;
};

TEST_F(Compare, EqualFilesAreTheSame) {
  const auto x = random(12, "x");
  const auto a = write("a.safetensors", {{"w", {3, 4}, x}, {"none", {0, 2}, {}}});
  const auto c = compare(a, a);
  EXPECT_TRUE(c.same());
  ASSERT_EQ(c.tensors.size(), 2);
  EXPECT_EQ(c.tensors[0].factor, 1);
  EXPECT_EQ(run_it({a, a}), 0);
}

TEST_F(Compare, AFactorIsNamed) {
  const auto x = random(64, "x"), y = random(64, "y");
  std::vector<float> twice = x, quarter = y;
  for (auto& v : twice) v *= 2;
  for (auto& v : quarter) v /= 4;
  const auto a = write("a.safetensors",
                       {{"fine", {64}, x}, {"gate", {8, 8}, twice}, {"expert", {64}, quarter}});
  const auto b =
      write("b.safetensors", {{"fine", {64}, x}, {"gate", {8, 8}, x}, {"expert", {64}, y}});
  const auto c = compare(a, b);
  ASSERT_FALSE(c.same());
  EXPECT_EQ(c.first_difference()->name, "gate");
  EXPECT_NEAR(c.tensors[1].factor, 2, 1e-6);
  EXPECT_NE(c.tensors[1].diagnosis().find("a is 2 times b"), std::string::npos)
      << c.tensors[1].diagnosis();
  EXPECT_NE(c.tensors[2].diagnosis().find("a is 1/4 of b"), std::string::npos)
      << c.tensors[2].diagnosis();
  EXPECT_EQ(run_it({a, b}), 1);
}

// Python's safetensors writes tensors by name within each dtype: layers.10 before layers.2.
TEST_F(Compare, AnAlphabeticalFileIsReadInNaturalOrder) {
  const auto x = random(4, "x"), y = random(4, "y");
  std::vector<Named> tensors, others;
  for (const char* name : {"a.weight", "layers.1.w", "layers.10.w", "layers.11.w", "layers.2.w"}) {
    tensors.push_back({name, {4}, x});
    others.push_back({name, {4}, std::string(name).starts_with("layers") ? y : x});
  }
  others[1].values = x;
  const auto c = compare(write("a.safetensors", tensors), write("b.safetensors", others));
  std::string order;
  for (const auto& t : c.tensors) order += t.name + " ";
  EXPECT_EQ(order, "a.weight layers.1.w layers.2.w layers.10.w layers.11.w ");
  EXPECT_EQ(c.first_difference()->name, "layers.2.w");
  // An order that somebody chose stays.
  std::swap(tensors[0], tensors[4]);
  EXPECT_EQ(
      compare(write("c.safetensors", tensors), write("b.safetensors", others)).tensors[0].name,
      "layers.2.w");
}

TEST(NaturalOrder, NumbersCountAsNumbers) {
  const std::vector<std::string> sorted{"",     "a",   "a0",    "a1",     "a1b", "a2",
                                        "a02b", "a10", "a10.9", "a10.10", "ab",  "b"};
  for (size_t i = 0; i < sorted.size(); ++i)
    for (size_t j = 0; j < sorted.size(); ++j)
      EXPECT_EQ(in_natural_order(sorted[i], sorted[j]), i < j) << sorted[i] << " and " << sorted[j];
}

TEST_F(Compare, TheWorstElementIsFound) {
  const auto x = random(60, "x");
  auto other = x;
  other[2 * 20 + 3 * 5 + 4] += 3;
  const auto c = compare(write("a.safetensors", {{"w", {3, 4, 5}, other}}),
                         write("b.safetensors", {{"w", {3, 4, 5}, x}}));
  EXPECT_EQ(c.tensors[0].state, Verdict::differs);
  EXPECT_EQ(c.tensors[0].worst_index, (std::vector<std::int64_t>{2, 3, 4}));
  EXPECT_NEAR(c.tensors[0].worst_a - c.tensors[0].worst_b, 3, 1e-5);
  EXPECT_EQ(c.tensors[0].diagnosis(), "");  // no factor explains one wrong element
}

TEST_F(Compare, NothingIsPassedOver) {
  const auto x = random(6, "x");
  auto bad = x;
  bad[5] = NAN;
  const auto a = write("a.safetensors", {{"shape", {2, 3}, x},
                                         {"mine", {6}, x},
                                         {"nan", {6}, bad},
                                         {"zero", {6}, std::vector<float>(6)}});
  const auto b =
      write("b.safetensors",
            {{"shape", {3, 2}, x}, {"yours", {6}, x}, {"nan", {6}, x}, {"zero", {6}, x}});
  const auto c = compare(a, b);
  ASSERT_EQ(c.tensors.size(), 5);
  EXPECT_EQ(c.tensors[0].state, Verdict::shape_differs);
  EXPECT_EQ(c.tensors[1].state, Verdict::only_in_a);
  EXPECT_EQ(c.tensors[2].state, Verdict::differs);
  EXPECT_EQ(c.tensors[2].diagnosis(), "not finite");
  EXPECT_EQ(c.tensors[2].worst_index, (std::vector<std::int64_t>{5}));
  EXPECT_NE(c.tensors[3].diagnosis().find("a is zero"), std::string::npos);
  EXPECT_EQ(c.tensors[4].state, Verdict::only_in_b);
  EXPECT_EQ(c.tensors[4].name, "yours");
}

// A gradient that is zero in theory is noise in practice: the other tensors say what counts as
// nothing.
TEST_F(Compare, NoiseBesideLargeTensorsIsTheSame) {
  const auto x = random(100, "x"), noise = random(100, "noise", 1e-9f),
             other = random(100, "other", 1e-9f);
  const auto c = compare(write("a.safetensors", {{"w", {100}, x}, {"gate", {100}, noise}}),
                         write("b.safetensors", {{"w", {100}, x}, {"gate", {100}, other}}));
  EXPECT_TRUE(c.same());
}

TEST_F(Compare, AMaskIsTheSameAsItself) {
  const std::vector<float> mask{0, -INFINITY, NAN, 1};
  auto other = mask;
  other[3] = -INFINITY;
  const auto a = write("a.safetensors", {{"mask", {4}, mask}}),
             b = write("b.safetensors", {{"mask", {4}, other}});
  EXPECT_TRUE(compare(a, a).same());
  const auto c = compare(a, b);
  EXPECT_FALSE(c.same());
  EXPECT_EQ(c.tensors[0].worst_index, (std::vector<std::int64_t>{3}));
}

TEST_F(Compare, FoldersAndRenames) {
  const auto x = random(8, "x"), y = random(8, "y");
  write("A/one.safetensors", {{"module.layers.0.w", {8}, x}});
  write("A/two.safetensors", {{"module.layers.1.w", {8}, y}});
  const auto b = write("b.safetensors",
                       {{"model.blocks.0.weight", {8}, x}, {"model.blocks.1.weight", {8}, y}});
  const auto a = (folder_ / "A").string();
  EXPECT_FALSE(compare(a, b).same());
  EXPECT_TRUE(
      compare(a, b, {.renames = {{"^module\\.layers", "model.blocks"}, {"w$", "weight"}}}).same());
  EXPECT_EQ(run_it({a, b, "--rename", "^module\\.layers=model.blocks", "--rename=w$=weight",
                    "--tolerance", "0"}),
            0);
  EXPECT_THROW(compare(a, b, {.renames = {{"[0-9]", "0"}}}), Error);  // two names become one
  EXPECT_THROW(compare(a, b, {.renames = {{"(", ""}}}), Error);
  expect_parts(
      error_of([&] { compare(a, b, {.renames = {{"never there", "$1"}}}); }, ErrorKind::config),
      {"--rename: ", "\"$1\"", "names a group that is not there"});
}

TEST_F(Compare, BadArgumentsSayWhatToDo) {
  const auto expect_text = [](const std::vector<std::string>& args, const std::string& text) {
    try {
      run_it(args);
      ADD_FAILURE() << "no error: " << text;
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find(text), std::string::npos) << e.what();
    }
  };
  expect_text({"a"}, "usage: moesh compare A B");
  expect_text({"a", "b", "--nonsense"}, "no option '--nonsense'");
  expect_text({"a", "b", "--tolerance", "x"}, "--tolerance is 'x'");
  expect_text({"a", "b", "--rename", "x"}, "PATTERN=REPLACEMENT");
  expect_text({folder_.string(), folder_.string()}, "holds no *.safetensors file");
}

}  // namespace
}  // namespace moesh::verify
