#pragma once
// For all kernel tests: the device (MOESH_TEST_DEVICE, cpu unless set), random tensors,
// comparison, poison.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "moesh/base/random.h"

namespace moesh::kernels {

inline at::Device test_device() {
  const char* name = std::getenv("MOESH_TEST_DEVICE");
  return at::Device(name ? name : "cpu");
}

/// Normal numbers that depend only on the name.
inline at::Tensor normal(at::IntArrayRef sizes, const std::string& name,
                         at::ScalarType dtype = at::kDouble, double scale = 1) {
  at::Tensor out = at::empty(sizes, at::kDouble);
  const Random random(1, name);
  for (std::int64_t i = 0; i < out.numel(); ++i)
    out.data_ptr<double>()[i] = scale * random.normal(i);
  return out.to(dtype).to(test_device());
}

/// While it lives, memory from at::empty holds NaN (integers: the largest), so that an element
/// which no one writes shows.
class Poison {
 public:
  Poison() { set(true); }
  ~Poison() { set(false); }
  Poison(const Poison&) = delete;
  Poison& operator=(const Poison&) = delete;

 private:
  static void set(bool on) {
    at::globalContext().setDeterministicAlgorithms(on, /*warn_only=*/true);
    at::globalContext().setDeterministicFillUninitializedMemory(on);
  }
};

inline double tolerance(at::ScalarType dtype) {
  return dtype == at::kDouble ? 1e-10 : dtype == at::kFloat ? 1e-5 : 2e-2;
}

/// |got - want| <= tol * |want| in the 2-norm; `floor` stands in for |want| where that is smaller.
/// NaN fails.
inline void expect_close(const at::Tensor& got, const at::Tensor& want, double tol,
                         const std::string& what, double floor = 1e-3) {
  ASSERT_TRUE(got.defined()) << what;
  ASSERT_EQ(got.sizes(), want.sizes()) << what;
  if (got.numel() == 0) return;
  const at::Tensor a = got.detach().cpu().to(at::kDouble), b = want.detach().cpu().to(at::kDouble);
  const double norm = b.norm().item<double>(), error = (a - b).norm().item<double>();
  EXPECT_TRUE(error <= tol * std::max(norm, floor))
      << what << ": |difference| " << error << ", |expected| " << norm;
}

inline void expect_equal(const at::Tensor& got, const at::Tensor& want, const std::string& what) {
  ASSERT_TRUE(got.defined() && want.defined()) << what;
  EXPECT_TRUE(at::equal(got.cpu(), want.cpu())) << what << "\n" << got << "\n" << want;
}

/// Indices of rows.
inline at::Tensor ints(std::vector<std::int64_t> values) {
  return at::tensor(values, at::kInt).to(test_device());
}

inline at::Tensor longs(std::vector<std::int64_t> values) {
  return at::tensor(values, at::kLong).to(test_device());
}

}  // namespace moesh::kernels
