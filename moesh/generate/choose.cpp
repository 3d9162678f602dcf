#include "moesh/generate/choose.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>
#include <vector>

#include "moesh/base/error.h"
#include "moesh/base/random.h"

namespace moesh::generate {

void ChooseOptions::validate() const {
  MOESH_CHECK(std::isfinite(temperature) && temperature >= 0, ErrorKind::config, "temperature is ",
              temperature, "; it takes 0 (always the likeliest token) or more");
  MOESH_CHECK(top_p > 0 && top_p <= 1, ErrorKind::config, "top-p is ", top_p,
              "; it takes more than 0, and up to 1 (all tokens)");
}

std::int64_t choose_token(const at::Tensor& logits_V, const ChooseOptions& o, std::int64_t index) {
  o.validate();
  const at::Tensor logits = logits_V.to(at::kCPU, at::kDouble).contiguous();
  const std::span<const double> values(logits.data_ptr<double>(),
                                       static_cast<std::size_t>(logits.numel()));
  MOESH_CHECK(std::all_of(values.begin(), values.end(), [](double v) { return std::isfinite(v); }),
              ErrorKind::diverged,
              "a logit is not finite: the weights of this model have diverged, or are not whole");
  const auto largest = std::max_element(values.begin(), values.end());
  if (o.temperature == 0) return largest - values.begin();

  std::vector<double> weights(values.size());
  std::transform(values.begin(), values.end(), weights.begin(),
                 [&](double v) { return std::exp((v - *largest) / o.temperature); });
  double left = std::accumulate(weights.begin(), weights.end(), 0.0);
  std::vector<std::size_t> ids(weights.size());
  std::iota(ids.begin(), ids.end(), 0);
  if (o.top_p < 1) {
    std::stable_sort(ids.begin(), ids.end(),
                     [&](std::size_t a, std::size_t b) { return weights[a] > weights[b]; });
    const double wanted = o.top_p * left;
    double sum = 0;
    std::size_t count = 0;
    while (count < ids.size() && sum < wanted) sum += weights[ids[count++]];
    ids.resize(count), left = sum;
  }
  double rest = Random(o.seed, "generate").uniform(static_cast<std::uint64_t>(index)) * left;
  for (const std::size_t id : ids)
    if ((rest -= weights[id]) < 0) return static_cast<std::int64_t>(id);
  return static_cast<std::int64_t>(ids.back());  // the sum was rounded
}

}  // namespace moesh::generate
