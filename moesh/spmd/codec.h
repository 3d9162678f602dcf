#pragma once
// Rows may travel to their experts in codes, such as those of float8. They are encoded once, where
// they come from, sorted, sent and gathered as they are, and decoded where they are used. What
// comes home from experts travels without codes: the gradient of coded rows is that of the rows.

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "moesh/spmd/tensor.h"

namespace moesh {

/// Codes of rows [R, D].
class RowCodec {
 public:
  virtual ~RowCodec() = default;
  /// [R, words], of a dtype that groups know.
  virtual at::Tensor encode(const at::Tensor& rows_RD) const = 0;
  /// The numbers of the codes, as rows of the width and the dtype of `like`.
  virtual at::Tensor decode(const at::Tensor& words, const at::Tensor& like) const = 0;
};
using Codec = std::shared_ptr<const RowCodec>;  // null: rows are their own codes

namespace raw {
/// [.., D] without memory, for the place of coded rows in the graph.
at::Tensor stands_for(at::IntArrayRef sizes, const at::TensorOptions& options);
/// What stands for x while it is coded; and the decoded rows, in the place of what stands for them.
at::Tensor begin_coded(const at::Tensor& x);
at::Tensor end_coded(const at::Tensor& place, const at::Tensor& rows);
at::Tensor map_coded(const at::Tensor& place, std::int64_t num_rows,
                     std::function<at::Tensor(const at::Tensor&)> adjoint);
}  // namespace raw

/// Coded rows, of a type that has a layout. They can be moved and sorted; to compute with them is
/// to have forgotten `decoded`.
template <class Rows>
class Coded {
 public:
  static constexpr auto layout = Rows::layout;

  Coded(Rows place, at::Tensor words, Codec codec)
      : place_(std::move(place)), words_(std::move(words)), codec_(std::move(codec)) {}

  /// Stands for the rows in the graph; without a codec these are the rows.
  const Rows& place() const { return place_; }
  const at::Tensor& words() const { return words_; }  // undefined without a codec
  const Codec& codec() const { return codec_; }

 private:
  Rows place_;
  at::Tensor words_;
  Codec codec_;
};

/// x in codes. A code is that of features of one row, all of which are here.
template <auto L>
auto coded(const Tensor<L>& x, const Codec& codec) {
  constexpr auto out = apply(Unary::over_features, L);
  using Rows = Tensor<out>;
  if (!codec) return Coded<Rows>(x, {}, codec);
  return Coded<Rows>(assume<out>(raw::begin_coded(x.local())), codec->encode(x.local().detach()),
                     codec);
}
/// The numbers of the codes.
template <class Rows>
Rows decoded(const Coded<Rows>& x) {
  if (!x.codec()) return x.place();
  const at::Tensor& place = x.place().local();
  return Rows::assume(raw::end_coded(place, x.codec()->decode(x.words(), place)));
}

template <class Fn, class Adjoint, class Rows>
Coded<Rows> map_linear(Fn f, Adjoint adjoint, const Coded<Rows>& x) {
  if (!x.codec()) return {map_linear(f, adjoint, x.place()), {}, nullptr};
  const at::Tensor words = f(x.words());
  return {Rows::assume(raw::map_coded(x.place().local(), words.size(0), adjoint)), words,
          x.codec()};
}

namespace raw {

template <class Part>
inline constexpr bool kIsCoded = false;
template <class Rows>
inline constexpr bool kIsCoded<Coded<Rows>> = true;

/// Coded, if the part is.
template <class Part, class Out>
using AsPart = std::conditional_t<kIsCoded<Part>, Coded<Out>, Out>;

/// The codes among the parts of a message, and what came of them.
struct Codes {
  std::vector<at::Tensor> words;  // undefined: the part travels as it is
  std::vector<Codec> codecs;
};
template <class Part>
const at::Tensor& place_of(const Part& part) {
  if constexpr (kIsCoded<Part>)
    return part.place().local();
  else
    return part.local();
}
template <class... Parts>
std::shared_ptr<Codes> codes_of(const Parts&... parts) {
  auto codes = std::make_shared<Codes>();
  const auto add = [&](const auto& part) {
    if constexpr (kIsCoded<std::remove_cvref_t<decltype(part)>>) {
      codes->words.push_back(part.words()), codes->codecs.push_back(part.codec());
    } else {
      codes->words.emplace_back(), codes->codecs.emplace_back();
    }
  };
  (add(parts), ...);
  return codes;
}
template <class Out>
Out with_codes(const at::Tensor& plain, const std::shared_ptr<Codes>& codes, std::size_t i) {
  if constexpr (kIsCoded<Out>)
    return Out(std::remove_cvref_t<decltype(std::declval<Out>().place())>::assume(plain),
               codes->words[i], codes->codecs[i]);
  else
    return Out::assume(plain);
}

}  // namespace raw
}  // namespace moesh
